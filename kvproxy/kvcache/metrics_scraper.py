"""Reads the engines' metrics and this host's, again and again, out of every request's path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvproxy.background_task import BackgroundTask
from kvproxy.clients.engine_metrics import EngineMetrics
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.errors import ClientError
from kvproxy.kvcache.actions.signals import HostUse, Signals
from kvproxy.kvcache.engines import Engines
from kvproxy.kvcache.feedback.bytes_per_token import BytesPerToken
from kvproxy.kvcache.feedback.hit_ratios import HitRatioStats
from kvproxy.kvcache.overlap.indexes import LocalIndexes
from kvproxy.kvcache.overlap.lookup import LookupClient
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.routing.engine_samples import Reading
from kvproxy.types import EndpointId, Sleep

log = logging.getLogger("kvproxy.kvcache")

#: The first round comes this long after the start: engines that just came up are busy enough.
FIRST_ROUND_S = 1.0
MAX_CONCURRENT = 16
#: Rounds that read nothing still forget who left and renew leases.
WITHOUT_READING_S = 5.0


class MetricsScraper(BackgroundTask):
    """Owns one task. Each round reads every engine (a few at a time), sizes its index, forgets who left, and ticks;
    with `interval_s` 0 no engine is read."""

    task_name = "kvcache watch"

    def __init__(
        self,
        interval_s: float,
        *,
        clusters: Mapping[str, Cluster],
        local: Mapping[str, LocalIndexes],
        engines: Engines,
        signals: Signals,
        lookups: LookupClient,
        ratios: BytesPerToken,
        accounts: HitRatioStats,
        sample_host: Callable[[], HostUse],
        on_round: Callable[[], None],
        former: MetricsScraper | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clusters = clusters
        self._local = local
        self._engines = engines
        self._signals = signals
        self._lookups = lookups
        self._ratios = ratios
        self._accounts = accounts
        self._sample_host = sample_host
        self._on_round = on_round
        self._sleep = sleep
        known = {} if former is None else former._present
        self._present: dict[str, Mapping[str, Endpoint]] = {name: known.get(name, {}) for name in clusters}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def _run(self) -> None:
        interval_s = self._interval_s or WITHOUT_READING_S
        await self._sleep(min(FIRST_ROUND_S, interval_s))
        while True:
            try:
                await self.round(reading=self._interval_s > 0)
            except Exception:
                log.exception("[kvcache] a round of readings is broken")
            await self._sleep(interval_s)

    async def round(self, *, reading: bool = True) -> None:
        """Everything once; without `reading` no engine is asked."""
        self._follow()
        if reading:
            await self._read_all()
        self._on_round()

    async def _read_all(self) -> None:
        self._signals.host(self._sample_host())
        present = [(name, endpoint) for name, cluster in self._clusters.items() for endpoint in cluster.endpoints]
        reads = [self._read(name, endpoint) for name, endpoint in present]
        await asyncio.gather(self._read_provider(), *reads)

    def _follow(self) -> None:
        """An endpoint that left, or is another engine now, holds nothing we know of."""
        for name, cluster in self._clusters.items():
            local, before = self._local[name], self._present[name]
            now = {str(endpoint.id): endpoint for endpoint in cluster.endpoints}
            for endpoint_id, endpoint in before.items():
                if endpoint_id not in now or now[endpoint_id].origin != endpoint.origin:
                    local.forget(endpoint.id)
            self._present[name] = now
            local.hot.endpoints = max(1, len(now))
        everybody = frozenset(endpoint for cluster in self._clusters.values() for endpoint in cluster.endpoints)
        self._engines.keep(everybody)
        self._signals.keep(everybody)

    async def _read(self, cluster: str, endpoint: Endpoint) -> None:
        try:
            async with self._slots:
                metrics = await self._engines.client(endpoint).metrics()
        except ClientError as error:
            log.debug("[kvcache] metrics of %s: %s", endpoint.id, error)
            return
        self._signals.engine(endpoint, metrics)
        if metrics.prefills is not None and metrics.prefill_s is not None:
            reading = Reading(metrics.prefills, metrics.prefill_s, metrics.prefill_tokens)
            self._clusters[cluster].scraped(endpoint, reading)
        if self._began_anew(cluster, endpoint.id, metrics):
            log.info("[kvcache] %s/%s is a new process: what it held is forgotten", cluster, endpoint.id)
        self._size(cluster, endpoint, metrics)

    def _began_anew(self, cluster: str, endpoint: EndpointId, metrics: EngineMetrics) -> bool:
        """Whether this is another process than before; one that does not say when it began tells by its counters."""
        local, anew = self._local[cluster], self._accounts.scraped((cluster, endpoint), metrics)
        if metrics.started_at is not None:
            return local.began(endpoint, metrics.started_at)
        if anew:
            local.lose(endpoint)
        return anew

    def _size(self, cluster: str, endpoint: Endpoint, metrics: EngineMetrics) -> None:
        """The index believes an endpoint to hold as much as its engine has room for, as far as nothing contradicts."""
        cache = metrics.cache
        if cache is None or not cache.capacity_tokens:
            return
        blocks = int(cache.capacity_tokens * self._ratios.typical) // TEXT_BLOCK_BYTES
        self._local[cluster].capacities.set_reported(endpoint.id, 0 if cache.prefix_caching is False else blocks)

    async def _read_provider(self) -> None:
        provider = self._lookups.provider
        if provider is None:
            return
        try:
            self._signals.provider(await provider.memory())
        except ClientError as error:
            log.debug("[kvcache] memory of LMCache: %s", error)
