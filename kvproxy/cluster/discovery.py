"""Sources of endpoints besides the configuration, polled or watched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random
from typing import NoReturn, Protocol

from kvproxy.base.background_task import TaskSet
from kvproxy.base.errors import ClientError, DiscoveryError
from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Sleep
from kvproxy.cluster.feature import ClusterFeature
from kvproxy.cluster.metrics import EndpointStateMetrics
from kvproxy.cluster.settings import DiscoverySettings, EndpointSettings
from kvproxy.cluster.sources.entries import AT_ONCE, Answer, LeftOut, Refuse, Source, Tell, all_bad, split_answer

log = logging.getLogger(__name__)

#: A source that takes longer to answer is polled again later.
POLL_TIMEOUT_S = 10.0
#: Of very many endpoints, the share that comes, changes or leaves in one turn of the event loop.
_SHARE = 0.0025
#: Invalid objects named in one log line.
_NAMED = 3
#: Lower bound on the interval of polls.
MIN_INTERVAL_S = 0.05


def sources_of(
    settings: DiscoverySettings,
    *,
    clock: Clock = time.monotonic,
    rng: Random | None = None,
    sleep: Sleep = asyncio.sleep,
) -> list[Source]:
    """Return the sources that a cluster's configuration names."""
    rng = rng or Random()
    return [
        source
        for feature in installed(ClusterFeature)
        for source in feature.list_sources(settings, clock=clock, rng=rng, sleep=sleep)
    ]


class Members(Protocol):
    """Endpoints by the source that names them."""

    def named_by(self, source: str) -> Sequence[EndpointSettings] | None:
        """Return the source's last answer; None before the first."""
        ...

    def apply_source(self, source: str, configs: Sequence[EndpointSettings]) -> None:
        """Apply the complete answer of `source`. ValueError refuses it."""
        ...


class Poller:
    """Polls each source in a task of its own, among `tasks`.

    A source that fails, or lists no endpoint at all and is not watched, changes nothing: its last good answer
    stays in use, and a new reason is logged. Invalid objects are left out one by one."""

    def __init__(
        self,
        cluster: str,
        sources: Sequence[Source],
        *,
        members: Members,
        tasks: TaskSet,
        metrics: Metrics,
        sleep: Sleep = asyncio.sleep,
        refuse: Refuse = lambda _: "",
    ) -> None:
        self._refuse = refuse
        self._cluster = cluster
        self.sources = sources
        self._tasks = tasks
        self._members = members
        self._sleep = sleep
        self._updates = metrics.group(EndpointStateMetrics).discovery
        self._failing = metrics.group(EndpointStateMetrics).discovery_failing
        self._skipped = metrics.group(EndpointStateMetrics).discovery_left_out
        self._asking: list[asyncio.Task[None]] = []
        #: Why a source does not answer, by its name; only of those that fail.
        self.complaints: dict[str, str] = {}
        #: Objects left out of the last answer, by source.
        self.left_out: dict[str, Sequence[LeftOut]] = {}

    def replace_sources(self, sources: Sequence[Source]) -> None:
        """Poll these sources and no others, at once for the first time. The last answer of a source of the same name
        stays in use until the next one."""
        self.stop()
        self.sources = sources
        self.complaints = {}
        self.left_out = {}
        if self._tasks.running:
            self.start(at_once=True)

    async def ask_all(self) -> None:
        """Each source once, so that the first request finds endpoints."""
        await asyncio.gather(*(self._poll(source) for source in self.sources))

    def start(self, *, at_once: bool) -> None:
        """Ask each source again and again, the first time now or after its interval; follow those that are watched."""
        for source in self.sources:
            self._failing.labels(self._cluster, source.name).set(source.name in self.complaints)
            self._skipped.labels(self._cluster, source.name).set(len(self.left_out.get(source.name, ())))
        self._asking = [
            self._tasks.start(self._run(source, at_once=at_once), name=f"discovery {self._cluster}/{source.name}")
            for source in self.sources
        ]

    def stop(self) -> None:
        """Stop polling."""
        for task in self._asking:
            task.cancel()
        for source in self.sources if self._asking else ():
            self._failing.remove(self._cluster, source.name)
            self._skipped.remove(self._cluster, source.name)
        self._asking = []

    async def _run(self, source: Source, *, at_once: bool) -> None:
        if source.follow is not None:
            await self._follow(source, source.follow)
        if at_once:
            await self._poll(source)
        while True:
            await self._sleep(max(source.interval_s, MIN_INTERVAL_S))
            await self._poll(source)

    async def _poll(self, source: Source) -> None:
        try:
            answer = await self._ask(source)
            if not answer and source.follow is None:
                raise DiscoveryError("it lists no endpoint")
        except Exception as error:  # noqa: BLE001 - of whatever kind: the others go on
            self._failed(source, self._reason(source, error))
        else:
            await self._hear(source, answer, "")

    async def _ask(self, source: Source) -> Answer:
        async with asyncio.timeout(POLL_TIMEOUT_S):
            return tuple(await source.discovery.endpoints())

    async def _confirm_empty(self, source: Source) -> Answer:
        """Return what a second reading of an answer without endpoints gives, as soon as there is one: a fleet does not
        vanish by a single one."""
        while True:
            try:
                return await self._ask(source)
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(source, self._reason(source, error))
            await self._sleep(source.interval_s)

    async def _follow(self, source: Source, follow: Callable[[Tell], Awaitable[None]]) -> NoReturn:
        while True:
            try:
                await follow(partial(self._hear, source))
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(source, self._reason(source, error))
            await self._sleep(source.interval_s)

    async def _hear(self, source: Source, answer: Answer | None, trouble: str) -> None:
        known = self._members.named_by(source.name)
        changed = False
        if answer is not None and not answer and known:
            answer = await self._confirm_empty(source)
        if answer is not None:
            try:
                endpoints, left_out = await split_answer(answer, known=known or (), refuse=self._refuse)
                self._note_left_out(source, left_out)
                if left_out and not endpoints:
                    raise all_bad(left_out)
                changed = endpoints != known
                if changed:
                    await self.update_in_steps(source.name, steps_towards(endpoints, known or ()))
            except (ValueError, ClientError) as error:
                trouble = str(error)
        if trouble:
            self._failed(source, trouble)
            return
        self._updates.labels(self._cluster, "changed" if changed else "unchanged").inc()
        if self.complaints.pop(source.name, None) is not None:
            self._failing.labels(self._cluster, source.name).set(0)
            log.info("discovery %s/%s answers again", self._cluster, source.name)

    def _note_left_out(self, source: Source, left_out: Sequence[LeftOut]) -> None:
        if self._asking:
            self._skipped.labels(self._cluster, source.name).set(len(left_out))
        if left_out and left_out != self.left_out.get(source.name):
            more = f" (and {len(left_out) - _NAMED} more)" if left_out[_NAMED:] else ""
            named = "; ".join(map(str, left_out[:_NAMED]))
            log.warning("discovery %s/%s leaves out %s%s", self._cluster, source.name, named, more)
        self.left_out.pop(source.name, None)
        if left_out:
            self.left_out[source.name] = left_out

    async def update_in_steps(self, source: str, steps: Iterable[Sequence[EndpointSettings]]) -> None:
        """Thousands that come or leave at once hold no request up."""
        for step in steps:
            await asyncio.sleep(0)
            self._members.apply_source(source, step)
            await asyncio.sleep(0)  # the next step is found in a turn of its own

    def _reason(self, source: Source, error: Exception) -> str:
        if isinstance(error, DiscoveryError | ClientError | OSError | ValueError):
            return str(error) or type(error).__name__
        log.error("discovery %s/%s is broken", self._cluster, source.name, exc_info=error)
        return repr(error)

    def _failed(self, source: Source, reason: str) -> None:
        self._updates.labels(self._cluster, "failed").inc()
        if self._asking:
            self._failing.labels(self._cluster, source.name).set(1)
        if self.complaints.get(source.name) != reason:
            self.complaints[source.name] = reason
            log.warning("discovery %s/%s: %s; its last endpoints stay", self._cluster, source.name, reason)


def steps_towards(
    wanted: Sequence[EndpointSettings], known: Sequence[EndpointSettings]
) -> Iterator[Sequence[EndpointSettings]]:
    """Yield the sets of endpoints between `known` and `wanted`: first changes, a few in each step, then additions, then
    removals. An unchanged endpoint is the same object in all of them."""
    before = {one.id: one for one in known}
    wanted = tuple(was if (was := before.get(one.id)) is one or was == one else one for one in wanted)
    named = {one.id: one for one in wanted}
    most = max(AT_ONCE, int(_SHARE * len(wanted)))
    changed = [name for name, one in named.items() if before.get(name, one) is not one]
    late = [*changed, *(name for name in named if name not in before)]
    leaving = [one for one in known if one.id not in named]
    for done in range(most, len(late), most):
        waiting = set(late[done:])
        as_before = (before[name] for name in changed[done:])
        yield (*(one for one in wanted if one.id not in waiting), *as_before, *leaving)
    for done in range(most, len(leaving), most):
        yield (*wanted, *leaving[done:])
    yield wanted
