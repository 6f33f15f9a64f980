"""Gauges of the indexes of all clusters: contents, cost, and accuracy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping

from kvproxy.base.background_task import in_slices
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Tier
from kvproxy.cache.metrics import IndexMetrics, KvCacheMetrics, TierMetrics
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.store import EVERY_INSTANCE, TierMemory
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint

#: Rows of the precise index with their share of its tables, as benchmarks/prefix_index.py measures them.
PRECISE_ROW_BYTES = 100

#: Label values, and a value.
Series = Iterable[tuple[tuple[str, ...], float]]
#: By source: the trusted share of its unbacked claims about an endpoint of a cluster.
TrustOf = Callable[[str, EndpointId], Mapping[str, float]]


def show_indexes(
    by_cluster: Mapping[str, LocalIndexes], clusters: Mapping[str, Cluster], trust: TrustOf, metrics: Metrics
) -> None:
    """Bind the gauges to these indexes."""
    shown = _Shown(by_cluster, clusters, trust)
    indexes = by_cluster.values()
    held = metrics.group(IndexMetrics)
    blocks = held.index_blocks
    blocks.labels("approximate").set_function(lambda: sum(one.approximate.counts.entries for one in indexes))
    blocks.labels("in_flight").set_function(lambda: sum(one.approximate.counts.in_flight_entries for one in indexes))
    blocks.labels("precise").set_function(shown.precise_blocks)
    blocks.labels("hot").set_function(lambda: sum(one.approximate.counts.unique_blocks for one in indexes))
    size = held.index_bytes
    size.labels("approximate").set_function(lambda: sum(one.approximate.counts.estimated_bytes for one in indexes))
    size.labels("precise").set_function(lambda: shown.precise_blocks() * PRECISE_ROW_BYTES)
    size.labels("sessions").set_function(lambda: sum(one.sessions.held_bytes for one in indexes))
    size.labels("last_served").set_function(lambda: sum(one.last_served.held_bytes for one in indexes))
    remembered = held.last_served
    remembered.labels("sessions").set_function(lambda: sum(one.last_served.sessions for one in indexes))
    remembered.labels("responses").set_function(lambda: sum(one.last_served.responses for one in indexes))
    held.index_utilisation.set_source(shown.utilisation_series)
    held.index_capacity.set_source(shown.capacity_series)
    held.reuse_step.set_source(shown.step_series)
    metrics.group(KvCacheMetrics).trust.set_source(shown.trust_series)


#: Pieces counted before other tasks run, and how long a count is used.
_SLICE_PIECES = 2048
_COUNT_EVERY_S = 30.0


class TierCounts:
    """Contents of each endpoint by its KV events, tier by tier. Counted between requests, in slices: an index keeps no
    sums, since events are applied at every block."""

    def __init__(
        self, by_cluster: Mapping[str, LocalIndexes], clusters: Mapping[str, Cluster], *, clock: Clock
    ) -> None:
        self._by_cluster = by_cluster
        self._clusters = clusters
        self._clock = clock
        self._counted_at = -math.inf
        self._found: dict[tuple[str, EndpointId], Mapping[Tier, tuple[int, int]]] = {}

    def holdings(self, cluster: str, endpoint: EndpointId) -> Mapping[Tier, tuple[int, int]]:
        """Blocks and tokens by tier, as last counted."""
        return self._found.get((cluster, endpoint), {})

    def describe(self, cluster: str, endpoint: Endpoint, memory: Iterable[TierMemory]) -> list[dict[str, object]]:
        """Describe the tiers of the endpoint's KV, the nearest first, for people: by its KV events, and by LMCache's
        reports on its instance and on the shared store."""
        counted = self.holdings(cluster, endpoint.id)
        said = {one.tier: one for one in memory if one.instance_id in (endpoint.instance_id, EVERY_INSTANCE)}
        return [
            {
                "tier": tier.value,
                "blocks": counted[tier][0] if tier in counted else None,
                "tokens": counted[tier][1] if tier in counted else None,
                "used_bytes": said[tier].used_bytes if tier in said else None,
                "capacity_bytes": said[tier].capacity_bytes or None if tier in said else None,
            }
            for tier in Tier
            if tier in counted or tier in said
        ]

    def bind_gauges(self, metrics: Metrics) -> None:
        metrics.group(TierMetrics).blocks.set_source(lambda: self._series(0))
        metrics.group(TierMetrics).tokens.set_source(lambda: self._series(1))

    async def refresh(self) -> None:
        """Count again, if the last count is old."""
        if self._clock() - self._counted_at < _COUNT_EVERY_S:
            return
        self._counted_at = self._clock()
        found: dict[tuple[str, EndpointId], Mapping[Tier, tuple[int, int]]] = {}
        for name, cluster in self._clusters.items():
            async for endpoint in in_slices(cluster.endpoints):
                found[name, endpoint.id] = await self._count(name, endpoint.id)
        self._found = found

    async def _count(self, cluster: str, endpoint: EndpointId) -> dict[Tier, tuple[int, int]]:
        sums: dict[Tier, tuple[int, int]] = {}
        for piece, (tier, blocks, tokens) in enumerate(self._by_cluster[cluster].precise.walk_tiers(endpoint), 1):
            before = sums.get(tier, (0, 0))
            sums[tier] = before[0] + blocks, before[1] + tokens
            if not piece % _SLICE_PIECES:
                await asyncio.sleep(0)
        return sums

    def _series(self, which: int) -> Series:
        for (cluster, endpoint), sums in self._found.items():
            yield from (((cluster, str(endpoint), tier.value), both[which]) for tier, both in sums.items())


class _Shown:
    """Asked by each scrape."""

    def __init__(self, indexes: Mapping[str, LocalIndexes], clusters: Mapping[str, Cluster], trust: TrustOf) -> None:
        self._indexes = indexes
        self._clusters = clusters
        self._trust = trust

    def precise_blocks(self) -> int:
        """Rows of the precise indexes."""
        return sum(self._indexes[name].precise.count_rows(endpoint.id) for name, endpoint in self._endpoints())

    def _endpoints(self) -> Iterable[tuple[str, Endpoint]]:
        return ((name, endpoint) for name, cluster in self._clusters.items() for endpoint in cluster.endpoints)

    def utilisation_series(self) -> Series:
        """Blocks each endpoint is estimated to hold against its capacity."""
        for name, endpoint in self._endpoints():
            approximate = self._indexes[name].approximate
            capacity = approximate.counts.capacity(endpoint.id)
            if capacity:
                yield (name, str(endpoint.id)), approximate.counts.held_blocks(endpoint.id) / capacity

    def capacity_series(self) -> Series:
        """Yield each endpoint's capacity in blocks, reported and learned."""
        for name, endpoint in self._endpoints():
            indexes = self._indexes[name]
            yield (name, str(endpoint.id), "told"), indexes.capacities.reported_blocks(endpoint.id)
            yield (name, str(endpoint.id), "learned"), indexes.approximate.counts.capacity(endpoint.id)

    def step_series(self) -> Series:
        """Step in which endpoints reuse, where they are known."""
        for name, endpoint in self._endpoints():
            step = self._indexes[name].steps.known.get(endpoint.id)
            if step is not None:
                yield (name, str(endpoint.id)), step

    def trust_series(self) -> Series:
        """How far each source is trusted about each endpoint."""
        for name, endpoint in self._endpoints():
            for source, share in self._trust(name, endpoint.id).items():
                yield (name, str(endpoint.id), source), share
