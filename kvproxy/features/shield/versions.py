"""Asks engines for their version, out of every request's path, and derives the faults that this fleet has."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from kvproxy.base.background_task import BackgroundTask, ask_each
from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.base.types import Sleep
from kvproxy.cache.clients.vllm import VllmClient
from kvproxy.cache.engines import Engines
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.engine import Engine
from kvproxy.features.shield.metrics import ShieldMetrics
from kvproxy.features.shield.rules import ALL_RULES, VLLM, Rule, open_rules

log = logging.getLogger("kvproxy.shield")

#: Engines that just came up are busy enough.
FIRST_ROUND_S = 1.0
#: New engines, and those that did not answer, are queried in each round; the others in every few, since an engine may
#: be upgraded in place.
ROUND_S = 5.0
ROUNDS = 12
MAX_CONCURRENT = 16
TIMEOUT_S = 2.0
_MAX_VERSION_CHARS = 64


class EngineVersions(BackgroundTask):
    """Owns one task. `rules` are the faults that some engine has, or may have as long as it was not asked."""

    task_name = "engine versions"

    def __init__(self, clusters: Mapping[str, Cluster], engines: Engines, *, sleep: Sleep = asyncio.sleep) -> None:
        self._clusters = clusters
        self._engines = engines
        self._sleep = sleep
        self.rules: frozenset[Rule] = self._collect_rules()

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        await self._engines.http.aclose()

    def bind_gauges(self, metrics: ShieldMetrics) -> None:
        """Bind the gauges to this instance."""
        metrics.affected.set_source(self._affected)
        metrics.unknown.set_source(
            lambda: (
                ((name,), sum(one.software == "" for one in each.engines)) for name, each in self._clusters.items()
            )
        )

    async def ask(self, *, again: bool = True) -> None:
        """Ask the engines for their versions; without `again` only those that have not reported one."""
        engines = [engine for cluster in self._clusters.values() for engine in cluster.engines]
        self._engines.keep_only(engines)
        await self.ask_engines(one for one in engines if again or one.software is None)

    async def ask_engines(self, engines: Iterable[Engine]) -> None:
        """Ask these, and see which faults there are now."""
        outcomes = await ask_each(list(engines), self._ask_one, at_once=MAX_CONCURRENT)
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # the others are queried all the same
                log.error("[shield] the question for a version is broken", exc_info=outcome)
        for cluster in self._clusters.values():
            cluster.software = frozenset(one.software for one in cluster.engines)
        self.rules = self._collect_rules()

    async def _run(self) -> None:
        await self._sleep(FIRST_ROUND_S)
        for number in itertools.count():
            await self.ask(again=number % ROUNDS == 0)
            await self._sleep(ROUND_S)

    async def _ask_one(self, engine: Engine) -> None:
        try:
            engine.software = await fetch_software(self._engines.client(engine), known=engine.software)
        except ClientError as error:
            log.debug("[shield] the version of %s: %s", engine.id, error)

    def _collect_rules(self) -> frozenset[Rule]:
        reported = {one.software for cluster in self._clusters.values() for one in cluster.engines}
        return frozenset[Rule]().union(*map(open_rules, reported)) if reported else ALL_RULES

    def _affected(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for name, cluster in self._clusters.items():
            known = Counter(one.software for one in cluster.engines if one.software)
            for rule in sorted(ALL_RULES):
                if count := sum(number for software, number in known.items() if rule in open_rules(software)):
                    yield (name, rule.value), count


async def fetch_software(client: VllmClient, *, known: str | None = None) -> str:
    """Return kind and version of an engine, "" where it reports none. Raises ClientError where it cannot be asked.

    Another kind of engine may have `/version` too: SGLang's numbers are low, so every one that has a fault and is not
    `known` is also asked whether it is SGLang.
    """
    software = ""
    with contextlib.suppress(NotSupported):
        software = f"{VLLM} {(await client.fetch_version()).strip()[:_MAX_VERSION_CHARS]}"
    if software and (software == known or not open_rules(software)):
        return software
    try:
        await client.sglang_info()
    except ClientError:
        return software
    return "SGLang"
