"""What the cache service knows of one endpoint, as plain data for people."""

from __future__ import annotations

from dataclasses import asdict

from kvproxy.clients.kv_events.status import StreamState, StreamStatus
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.kvcache.service import KvCache
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES

#: The worst stream decides what an endpoint's index is worth.
_WORST_FIRST = (StreamState.APPROXIMATE, StreamState.DEGRADED, StreamState.CONNECTING)


def endpoint_index(service: KvCache, cluster: str, endpoint: Endpoint) -> dict[str, object]:
    """What is believed of one endpoint, and how far. Blocks of the approximate index are text, not tokens."""
    overlap = service.overlap
    indexes = overlap.indexes[cluster]
    streams = {} if overlap.streams is None else overlap.streams.streams(endpoint)
    loss = service.state.losses.latest(cluster, endpoint.id)
    return {
        "state": index_worth(streams).value,
        "events_believed": endpoint.id not in indexes.missed.doubted,
        "names_pairs": endpoint.id in indexes.followed.paired,
        "last_loss": None if loss is None else {"reason": loss.reason.value, "age_s": loss.age_s},
        "streams": [
            {"rank": rank, "state": one.state.value, "reason": one.reason.value} for rank, one in streams.items()
        ],
        "approximate_blocks": indexes.approximate.held_blocks(endpoint.id),
        "approximate_capacity_blocks": indexes.approximate.capacity(endpoint.id),
        "told_capacity_blocks": indexes.capacities.reported_blocks(endpoint.id),
        "reuse_step_tokens": indexes.steps.known.get(endpoint.id),
        "trust": overlap.trust(cluster, endpoint.id),
        "hit_ratio": asdict(service.state.hit_ratios.use((cluster, endpoint.id))),
        "block_bytes": TEXT_BLOCK_BYTES,
        "precise_blocks": indexes.precise.count_rows(endpoint.id),
    }


def engine_status(service: KvCache, endpoint: Endpoint) -> dict[str, object] | None:
    """What the engine's own metrics said last; None before that."""
    reading = service.scraper.signals.reading(endpoint)
    if reading is None:
        return None
    age_s, metrics = reading
    cache = metrics.cache
    return {
        "age_s": age_s,
        "kind": metrics.kind.value,
        "asleep": metrics.asleep,
        "kv_usage": metrics.kv_usage,
        "waiting": metrics.waiting,
        "running": metrics.running,
        "capacity_tokens": None if cache is None else cache.capacity_tokens,
        "prefix_caching": None if cache is None else cache.prefix_caching,
    }


def index_worth(streams: dict[int, StreamStatus]) -> StreamState:
    """What an index fed by these streams is worth; without any, only what was routed is known."""
    if not streams:
        return StreamState.APPROXIMATE
    states = {one.state for one in streams.values()}
    return next((state for state in _WORST_FIRST if state in states), StreamState.EXACT)
