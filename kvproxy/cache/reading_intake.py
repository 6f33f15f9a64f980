"""Effects of an engine's reading: load, ranks, the size of its index, and the trust in an engine that restarted or
sleeps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import lcm

from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.actions.signals import Signals
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.state import CacheState
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.routing.engine_samples import Reading
from kvproxy.cluster.routing.load import EngineState

log = logging.getLogger("kvproxy.kvcache")


class ReadingIntake:
    """Gives each reading to all that learns of it: `signals`, the ledgers, the `indexes` by cluster, and the state."""

    def __init__(
        self, state: CacheState, *, indexes: Mapping[str, LocalIndexes], signals: Signals, clock: Clock
    ) -> None:
        self._signals = signals
        self._indexes = indexes
        self._bytes_per_token = state.bytes_per_token
        self._hit_ratios = state.hit_ratios
        self._losses = state.losses
        self._clock = clock

    def take(self, cluster: Cluster, engine: Engine, metrics: EngineMetrics) -> None:
        """Distribute an engine's reading to all that learn from it."""
        engine.adapters.use = metrics.lora
        restarted = False
        for endpoint in cluster.members.of_engine(engine):
            own = metrics if endpoint.rank is None else metrics.ranks.get(endpoint.rank)
            if own is not None:
                restarted |= self._observe(cluster, endpoint, own)
        if restarted:
            log.info("[kvcache] %s/%s is a new process: its index is cleared", cluster.name, engine.id)
            cluster.forget_process(engine)

    def _observe(self, cluster: Cluster, endpoint: Endpoint, metrics: EngineMetrics) -> bool:
        """Observe the reading of an engine, or of one rank; returns True for a new process."""
        latest = self._signals.latest_scrape(endpoint)
        self._signals.note_scrape(endpoint, metrics)
        if metrics.asleep is not endpoint.asleep:
            endpoint.asleep = metrics.asleep
            how = "sleeps: it is left out" if metrics.asleep else "is awake again"
            log.info("[kvcache] %s/%s %s", cluster.name, endpoint.id, how)
        if metrics.gave_up_cache and not (latest is not None and latest[1].gave_up_cache):
            self._gave_up(cluster.name, endpoint)
        capacity_tokens = None if metrics.cache is None else metrics.cache.capacity_tokens
        now = self._clock()
        endpoint.load.engine = EngineState(now, capacity_tokens, metrics.kv_usage, metrics.running, metrics.waiting)
        if metrics.prefills is not None and metrics.prefill_s is not None:
            cluster.observe_engine(endpoint, Reading(metrics.prefills, metrics.prefill_s, metrics.prefill_tokens))
        restarted = self._restarted(cluster.name, endpoint.id, metrics)
        if restarted:
            self._losses.note_loss(cluster.name, endpoint.id, LossReason.RESTARTED)
        self._size(cluster.name, endpoint, metrics)
        return restarted

    def forget_sleep(self, cluster: Cluster, engine: Engine) -> None:
        """Forget an old report of sleep, which must not exclude the engine any longer."""
        for endpoint in cluster.members.of_engine(engine):
            latest = self._signals.latest_scrape(endpoint)
            if latest is None or latest[0] > self._signals.max_age_s:
                endpoint.asleep = False

    def _gave_up(self, cluster: str, endpoint: Endpoint) -> None:
        """Its sleep is so deep that it gave its KV memory up."""
        self._indexes[cluster].forget_cache(endpoint.id)
        self._losses.note_loss(cluster, endpoint.id, LossReason.ASLEEP)

    def _restarted(self, cluster: str, endpoint: EndpointId, metrics: EngineMetrics) -> bool:
        """Return True if this is another process than before; without a start time its counters decide."""
        indexes = self._indexes[cluster]
        restarted = self._hit_ratios.read_counters((cluster, endpoint), metrics)
        if metrics.started_at is not None:
            return indexes.process_started(endpoint, metrics.started_at)
        if restarted:
            indexes.reset_endpoint(endpoint)
        return restarted

    def _size(self, cluster: str, endpoint: Endpoint, metrics: EngineMetrics) -> None:
        """Size the index of an endpoint by its engine's reported capacity, in blocks of its own size, unless evidence
        contradicts."""
        cache = metrics.cache
        indexes = self._indexes[cluster]
        block_tokens = None if cache is None else cache.block_tokens
        indexes.steps.tell_block_size(endpoint.id, lcm(block_tokens or 1, indexes.precise.step_tokens(endpoint.id)))
        if cache is None or not cache.capacity_tokens:
            return
        blocks = int(cache.capacity_tokens * self._bytes_per_token.typical) // TEXT_BLOCK_BYTES
        indexes.capacities.set_reported(endpoint.id, 0 if cache.prefix_caching is False else blocks)
