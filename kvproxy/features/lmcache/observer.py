"""LMCache in one cache service: its store, what the strategies get to see, and its gauges."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.lmcache.cold_prefixes import MAX_PRIORITIES, PrefixPriorities
from kvproxy.features.lmcache.connection import EmptyLookups
from kvproxy.features.lmcache.metrics import LMCacheMetrics
from kvproxy.features.lmcache.pressure import memory_series
from kvproxy.features.lmcache.settings import strategy_of
from kvproxy.features.lmcache.store import LMCacheStore


class LMCacheObserver(CacheObserver):
    """Sets the store of the service."""

    def __init__(self, parts: CacheParts) -> None:
        strategy = strategy_of(parts.settings)
        self.store = LMCacheStore(parts)
        parts.overlap.store = self.store
        self._stated = (strategy.pin_instance_id, strategy.compress_instance_id, strategy.evict_instance_id)
        self._overlap = parts.overlap
        self._metrics = parts.metrics
        self._priorities = parts.state.of(PrefixPriorities)
        self._empty = EmptyLookups(clock=parts.clock)

    def tokens_known(
        self, facts: RequestFacts, used: Sequence[KnownPrefix], tokens: TokenIds, endpoint: Endpoint
    ) -> None:
        """Run the strategies, if any is enabled."""
        if self.store.strategies is not None:
            self.store.strategies.plan(used, endpoint.instance_id)

    def learned(self, facts: RequestFacts, result: Result) -> None:
        """Compare the lookup's answer with what the engine reused."""
        if facts.holders_found is not None and result.prefilled and result.cached_tokens is not None:
            self._empty.observe_lookup(
                cached_tokens=result.cached_tokens,
                holders_named=facts.holders_found,
                ever_hit=self.store.lookups.hits > 0,
            )

    def tick(self) -> None:
        """Forget instances other than those of endpoints and settings, and renew pins that are due."""
        there = {*self._overlap.instance_ids(), *self._stated}
        self.store.executor.keep_only(there)
        if self.store.strategies is not None:
            self.store.strategies.tick(there)

    def describe_status(self) -> dict[str, object]:
        """Count lookups and actions, and list what switched itself off."""
        return {
            "lookups": self._metrics.group(LMCacheMetrics).lookups.sum_by("outcome"),
            "actions": self._metrics.group(LMCacheMetrics).actions.sum_by("result"),
            "switched_off": [f"{kind} at {instance}" for kind, instance in self.store.executor.switched_off],
        }

    def bind_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges to this observer."""
        bounds = metrics.group(BoundMetrics)
        bounds.show_queue("priorities", lambda: len(self._priorities.by_key), limit=MAX_PRIORITIES)
        self.store.lookup_task.bind_gauges(metrics)
        metrics.group(LMCacheMetrics).bytes.set_source(lambda: memory_series(self.store.memory))
