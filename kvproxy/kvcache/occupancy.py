"""How full the indexes and the engines are, read for metrics when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvproxy.clients.engine_metrics import EngineMetrics
from kvproxy.routing.policy import FactSource
from kvproxy.types import EndpointId

if TYPE_CHECKING:
    from kvproxy.kvcache.parts import Parts

#: Rows of the precise index with their share of its tables, as benchmarks/prefix_index.py measures them.
PRECISE_ROW_BYTES = 100

#: Label values, and a value.
Series = Iterable[tuple[tuple[str, ...], float]]


def utilisation(parts: Parts) -> Series:
    """Blocks each endpoint is believed to hold against its capacity."""
    for name, cluster in parts.clusters.items():
        approximate = parts.local[name].approximate
        for endpoint in cluster.endpoints:
            capacity = approximate.capacity(endpoint.id)
            if capacity:
                yield (name, str(endpoint.id)), approximate.held_blocks(endpoint.id) / capacity


def capacities(parts: Parts) -> Series:
    """Blocks each endpoint has room for, as its engine says and as it proved."""
    for name, cluster in parts.clusters.items():
        local = parts.local[name]
        for endpoint in cluster.endpoints:
            yield (name, str(endpoint.id), "told"), local.capacities.reported(endpoint.id)
            yield (name, str(endpoint.id), "learned"), local.approximate.capacity(endpoint.id)


def trust(parts: Parts) -> Series:
    """How far each source is believed about each endpoint, where nothing else backs it and it was ever tried."""
    for name, cluster in parts.clusters.items():
        for endpoint in cluster.endpoints:
            for source, share in shares(parts, name, endpoint.id).items():
                yield (name, str(endpoint.id), source), share


def shares(parts: Parts, cluster: str, endpoint: EndpointId) -> dict[str, float]:
    """The same of one endpoint, by source."""
    local, provider = parts.local[cluster], parts.lookups.provider
    sources = {FactSource.PRECISE: local.trust}
    if provider is not None:
        sources[provider.source] = local.lookup_trust
    return {source.value: one.share(endpoint) for source, one in sources.items() if endpoint in one}


def kv_usage(parts: Parts) -> Series:
    """KV memory in use, where the engine's metrics say it and are not too old."""
    for labels, metrics in _readings(parts):
        if metrics.kv_usage is not None:
            yield labels, metrics.kv_usage


def engine_requests(parts: Parts) -> Series:
    """Requests running and waiting there."""
    for labels, metrics in _readings(parts):
        for state, count in (("running", metrics.running), ("waiting", metrics.waiting)):
            if count is not None:
                yield (*labels, state), count


def _readings(parts: Parts) -> Iterable[tuple[tuple[str, str], EngineMetrics]]:
    for name, cluster in parts.clusters.items():
        for endpoint in cluster.endpoints:
            reading = parts.signals.reading(endpoint)
            if reading is not None and reading[0] <= parts.signals.max_age_s:
                yield (name, str(endpoint.id)), reading[1]
