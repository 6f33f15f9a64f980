"""What the kvcache service is made of, put together in one place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.kvcache.actions.executor import ActionExecutor
from kvproxy.kvcache.actions.job_queue import JobQueue
from kvproxy.kvcache.actions.signals import HostUse, Signals
from kvproxy.kvcache.actions.strategy_runner import StrategyRunner
from kvproxy.kvcache.breakers import OperationBreakers
from kvproxy.kvcache.engines import Engines
from kvproxy.kvcache.feedback.bytes_per_token import BytesPerToken
from kvproxy.kvcache.feedback.predictions import PredictionFeedback
from kvproxy.kvcache.metrics_scraper import MetricsScraper
from kvproxy.kvcache.occupancy import PRECISE_ROW_BYTES, capacities, engine_requests, kv_usage, trust, utilisation
from kvproxy.kvcache.overlap.indexes import LocalIndexes
from kvproxy.kvcache.overlap.kv_event_streams import EventStreams
from kvproxy.kvcache.overlap.lookup import LookupClient
from kvproxy.kvcache.overlap.lookup_task import LookupTask
from kvproxy.kvcache.overlap.tokens import TokenSource
from kvproxy.kvcache.snapshot.restart import warm_restart
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock
from kvproxy.upstream.pool import UpstreamPool

#: A reading of an engine older than this many intervals (and a while) says nothing any more.
_STALE_INTERVALS, _STALE_S = 3, 5.0


class Parts:
    """Built here, entered and left by the service."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        clusters: Mapping[str, Cluster],
        metrics: Metrics,
        clock: Clock,
        wall_clock: Clock,
        rng: random.Random,
        sample_host: Callable[[], HostUse],
        former: Parts | None,
    ) -> None:
        self.settings = settings
        self.clusters = clusters
        self.pool = UpstreamPool(max_connections=settings.max_connections, clock=clock)
        self.engines = Engines(self.pool, timeout_s=settings.request_timeout, tokenizer_url=settings.vllm_endpoint)
        known = {} if former is None else former.local
        self.local: dict[str, LocalIndexes] = {
            name: LocalIndexes(
                endpoints=len(cluster.endpoints), learn_capacity=settings.learn_capacity, former=known.get(name)
            )
            for name, cluster in clusters.items()
        }
        self.ratios: BytesPerToken = BytesPerToken() if former is None else former.ratios
        self.guard = OperationBreakers(settings.circuit_breaker, clock=clock, metrics=metrics)
        self.lookups = LookupClient(guard=self.guard, metrics=metrics, clock=clock)
        shared = _Shared(settings, metrics, clock)
        self.tokens = TokenSource(settings, engines=self.engines, guard=self.guard, metrics=metrics, clock=clock)
        self.remote = shared.remote(self.tokens, self.lookups, self.instance_ids)
        self.background = JobQueue(settings.background, metrics=metrics)
        max_age_s = _STALE_INTERVALS * settings.engine_metrics_interval + _STALE_S
        self.signals = Signals(settings.cache_strategy, clock=clock, max_age_s=max_age_s)
        self.upkeep = shared.upkeep(self, rng)
        self.learning: PredictionFeedback = PredictionFeedback(
            ratios=self.ratios,
            lookups=self.lookups,
            metrics=metrics,
            clock=clock,
            former=None if former is None else former.learning,
        )
        self.watch: MetricsScraper = shared.watch(self, sample_host, None if former is None else former.watch)
        self.streams = shared.streams(self) if settings.kv_events else None
        self.warm = warm_restart(
            self, settings.snapshot, fresh=former is None, metrics=metrics, clock=clock, wall_clock=wall_clock
        )
        self._show(metrics)

    def endpoints(self) -> Iterable[Endpoint]:
        """All endpoints of all clusters."""
        return (endpoint for cluster in self.clusters.values() for endpoint in cluster.endpoints)

    def instance_ids(self) -> frozenset[str]:
        """LMCache instance ids of every endpoint there is."""
        return frozenset(endpoint.instance_id for endpoint in self.endpoints())

    def tick(self) -> None:
        """Between requests."""
        present = {(name, one.id) for name, cluster in self.clusters.items() for one in cluster.endpoints}
        self.learning.keep(present)
        self.upkeep.tick()

    def _show(self, metrics: Metrics) -> None:
        """Sizes are read when somebody asks for them."""
        sources, memory = self.local.values(), self.tokens.memory
        blocks = metrics.holdings.index_blocks
        blocks.labels("approximate").set_function(lambda: sum(s.approximate.entries for s in sources))
        blocks.labels("in_flight").set_function(lambda: sum(s.approximate.in_flight_entries for s in sources))
        blocks.labels("precise").set_function(self._precise_blocks)
        blocks.labels("hot").set_function(lambda: sum(s.approximate.unique_blocks for s in sources))
        size = metrics.holdings.index_bytes
        size.labels("approximate").set_function(lambda: sum(s.approximate.estimated_bytes for s in sources))
        size.labels("precise").set_function(lambda: self._precise_blocks() * PRECISE_ROW_BYTES)
        size.labels("sessions").set_function(lambda: sum(s.sessions.held_bytes for s in sources))
        metrics.holdings.index_utilisation.read(lambda: utilisation(self))
        metrics.holdings.index_capacity.read(lambda: capacities(self))
        metrics.kvcache.trust.read(lambda: trust(self))
        metrics.holdings.engine_kv_usage.read(lambda: kv_usage(self))
        metrics.holdings.engine_requests.read(lambda: engine_requests(self))
        metrics.holdings.token_memory_entries.set_function(lambda: len(memory))
        metrics.holdings.token_memory_bytes.set_function(lambda: memory.held_bytes)
        results = ("exact", "prefix", "missed")
        metrics.holdings.recalls.read(lambda: [((result,), float(getattr(memory.stats, result))) for result in results])

    def _precise_blocks(self) -> int:
        rows = [(self.local[name].precise, cluster.endpoints) for name, cluster in self.clusters.items()]
        return sum(precise.rows(endpoint.id) for precise, endpoints in rows for endpoint in endpoints)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What nearly every part is made with."""

    settings: KvCacheSettings
    metrics: Metrics
    clock: Clock

    def remote(self, tokens: TokenSource, lookups: LookupClient, known: Callable[[], frozenset[str]]) -> LookupTask:
        return LookupTask(
            self.settings,
            tokens=tokens,
            lookups=lookups,
            known_instances=known,
            metrics=self.metrics,
            clock=self.clock,
        )

    def upkeep(self, parts: Parts, rng: random.Random) -> StrategyRunner:
        actions = ActionExecutor(
            self.settings,
            background=parts.background,
            lookups=parts.lookups,
            guard=parts.guard,
            metrics=self.metrics,
            clock=self.clock,
            rng=rng,
        )
        return StrategyRunner(
            self.settings,
            actions=actions,
            signals=parts.signals,
            lookups=parts.lookups,
            endpoints=parts.endpoints,
            clock=self.clock,
        )

    def watch(self, parts: Parts, sample_host: Callable[[], HostUse], former: MetricsScraper | None) -> MetricsScraper:
        return MetricsScraper(
            self.settings.engine_metrics_interval,
            clusters=parts.clusters,
            local=parts.local,
            engines=parts.engines,
            signals=parts.signals,
            lookups=parts.lookups,
            ratios=parts.ratios,
            sample_host=sample_host,
            accounts=parts.learning.accounts,
            on_round=parts.tick,
            former=former,
        )

    def streams(self, parts: Parts) -> EventStreams:
        return EventStreams(
            clusters=parts.clusters,
            local=parts.local,
            engines=parts.engines,
            metrics=self.metrics,
            clock=self.clock,
            stated=self.settings.kv_event_sources,
        )
