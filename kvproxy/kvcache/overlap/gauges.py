"""What is shown of the indexes of all clusters: how much they hold, what it takes, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvproxy.clients.kv_events.status import StreamState, StreamStatus
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.kvcache.overlap.indexes import LocalIndexes
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import EndpointId

#: Rows of the precise index with their share of its tables, as benchmarks/prefix_index.py measures them.
PRECISE_ROW_BYTES = 100

#: The worst stream decides what an endpoint's index is worth.
_WORST_FIRST = (StreamState.APPROXIMATE, StreamState.DEGRADED, StreamState.CONNECTING)

#: Label values, and a value.
Series = Iterable[tuple[tuple[str, ...], float]]
#: By source: the share of its unbacked claims about an endpoint of a cluster that is believed.
TrustOf = Callable[[str, EndpointId], Mapping[str, float]]


def show_indexes(
    by_cluster: Mapping[str, LocalIndexes], clusters: Mapping[str, Cluster], trust: TrustOf, metrics: Metrics
) -> None:
    """The gauges read these from now on."""
    shown, indexes = _Shown(by_cluster, clusters, trust), by_cluster.values()
    blocks = metrics.holdings.index_blocks
    blocks.labels("approximate").set_function(lambda: sum(one.approximate.entries for one in indexes))
    blocks.labels("in_flight").set_function(lambda: sum(one.approximate.in_flight_entries for one in indexes))
    blocks.labels("precise").set_function(shown.precise_blocks)
    blocks.labels("hot").set_function(lambda: sum(one.approximate.unique_blocks for one in indexes))
    size = metrics.holdings.index_bytes
    size.labels("approximate").set_function(lambda: sum(one.approximate.estimated_bytes for one in indexes))
    size.labels("precise").set_function(lambda: shown.precise_blocks() * PRECISE_ROW_BYTES)
    size.labels("sessions").set_function(lambda: sum(one.sessions.held_bytes for one in indexes))
    size.labels("last_served").set_function(lambda: sum(one.last_served.held_bytes for one in indexes))
    remembered = metrics.holdings.last_served
    remembered.labels("sessions").set_function(lambda: sum(one.last_served.sessions for one in indexes))
    remembered.labels("responses").set_function(lambda: sum(one.last_served.responses for one in indexes))
    metrics.holdings.index_utilisation.set_source(shown.utilisation_series)
    metrics.holdings.index_capacity.set_source(shown.capacity_series)
    metrics.holdings.reuse_step.set_source(shown.step_series)
    metrics.kvcache.trust.set_source(shown.trust_series)


class _Shown:
    """Asked by each scrape."""

    def __init__(self, indexes: Mapping[str, LocalIndexes], clusters: Mapping[str, Cluster], trust: TrustOf) -> None:
        self._indexes, self._clusters, self._trust = indexes, clusters, trust

    def precise_blocks(self) -> int:
        """Rows of the precise indexes."""
        return sum(self._indexes[name].precise.count_rows(endpoint.id) for name, endpoint in self._endpoints())

    def _endpoints(self) -> Iterable[tuple[str, Endpoint]]:
        return ((name, endpoint) for name, cluster in self._clusters.items() for endpoint in cluster.endpoints)

    def utilisation_series(self) -> Series:
        """Blocks each endpoint is believed to hold against its capacity."""
        for name, endpoint in self._endpoints():
            approximate = self._indexes[name].approximate
            capacity = approximate.capacity(endpoint.id)
            if capacity:
                yield (name, str(endpoint.id)), approximate.held_blocks(endpoint.id) / capacity

    def capacity_series(self) -> Series:
        """Blocks each endpoint has room for, as its engine says and as it proved."""
        for name, endpoint in self._endpoints():
            indexes = self._indexes[name]
            yield (name, str(endpoint.id), "told"), indexes.capacities.reported_blocks(endpoint.id)
            yield (name, str(endpoint.id), "learned"), indexes.approximate.capacity(endpoint.id)

    def step_series(self) -> Series:
        """Steps in which endpoints reuse, where they are known."""
        for name, endpoint in self._endpoints():
            step = self._indexes[name].steps.known.get(endpoint.id)
            if step is not None:
                yield (name, str(endpoint.id)), step

    def trust_series(self) -> Series:
        """How far each source is believed about each endpoint."""
        for name, endpoint in self._endpoints():
            for source, share in self._trust(name, endpoint.id).items():
                yield (name, str(endpoint.id), source), share


def index_worth(streams: dict[int, StreamStatus]) -> StreamState:
    """What an index fed by these streams is worth; without any, only what was routed is known."""
    if not streams:
        return StreamState.APPROXIMATE
    states = {one.state for one in streams.values()}
    return next((state for state in _WORST_FIRST if state in states), StreamState.EXACT)
