"""Asks the discoveries of one cluster again and again, and passes on what changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Self

from kvproxy.cluster.discovery import Source
from kvproxy.config.cluster_schema import EndpointSettings
from kvproxy.errors import DiscoveryError
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Sleep

log = logging.getLogger(__name__)

#: A source that takes longer to answer is asked again later.
POLL_TIMEOUT_S = 10.0

#: No source is asked more often, whatever its interval says.
MIN_INTERVAL_S = 0.05

OnUpdate = Callable[[str, Sequence[EndpointSettings]], None]


class Poller:
    """Owns one task a source. Entering asks every source once, so that the first request finds endpoints.

    A source that fails, or knows no endpoint at all, changes nothing: its last good answer stands, and the reason is
    logged when it is a new one. `on_update` gets a source's name and its whole new answer; ValueError refuses it.
    """

    def __init__(
        self,
        cluster: str,
        sources: Sequence[Source],
        *,
        on_update: OnUpdate,
        metrics: Metrics,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._cluster = cluster
        self._sources = sources
        self._on_update = on_update
        self._sleep = sleep
        self._updates = metrics.endpoint.discovery
        self._answers: dict[str, tuple[EndpointSettings, ...]] = {}
        self._complaints: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._running = False

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(self._poll(source) for source in self._sources))
        self._running = True
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running = False
        self._end()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def reconfigure(self, sources: Sequence[Source]) -> None:
        """Ask these from now on, at once for the first time. What one of the same name answered stands until it does;
        what a source that is gone answered goes with it."""
        self._end()
        gone = self._answers.keys() - {source.name for source in sources}
        self._sources = sources
        for name in gone:
            del self._answers[name]
            self._complaints.pop(name, None)
            self._on_update(name, ())
        if self._running:
            self._begin(at_once=True)

    def _begin(self, *, at_once: bool = False) -> None:
        self._tasks = [
            asyncio.create_task(self._run(source, at_once=at_once), name=f"discovery {self._cluster}/{source.name}")
            for source in self._sources
        ]

    def _end(self) -> None:
        for task in self._tasks:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()
        self._tasks = []

    async def _run(self, source: Source, *, at_once: bool) -> None:
        if at_once:
            await self._poll(source)
        while True:
            await self._sleep(max(source.interval_s, MIN_INTERVAL_S))
            await self._poll(source)

    async def _poll(self, source: Source) -> None:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                answer = tuple(await source.discovery.endpoints())
            if not answer:
                raise DiscoveryError("it knows no endpoint")
            changed = answer != self._answers.get(source.name)
            if changed:
                self._on_update(source.name, answer)
        except (DiscoveryError, OSError, ValueError) as error:
            self._failed(source, str(error) or type(error).__name__)
            return
        except Exception as error:
            log.exception("discovery %s/%s is broken", self._cluster, source.name)
            self._failed(source, repr(error))
            return
        self._answers[source.name] = answer
        self._updates.labels(self._cluster, "changed" if changed else "unchanged").inc()
        if self._complaints.pop(source.name, None) is not None:
            log.info("discovery %s/%s answers again", self._cluster, source.name)

    def _failed(self, source: Source, reason: str) -> None:
        self._updates.labels(self._cluster, "failed").inc()
        if self._complaints.get(source.name) != reason:
            self._complaints[source.name] = reason
            log.warning("discovery %s/%s: %s; its last endpoints stay", self._cluster, source.name, reason)
