"""What the kvcache service knows and does, as plain data for people. Reads only; hashes, never prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvproxy.clients.kv_events.status import StreamState, StreamStatus
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.kvcache.occupancy import PRECISE_ROW_BYTES, shares
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES

if TYPE_CHECKING:
    from kvproxy.kvcache.parts import Parts

#: The worst stream decides what an endpoint's index is worth.
_WORST_FIRST = (StreamState.APPROXIMATE, StreamState.DEGRADED, StreamState.CONNECTING)


def cache_status(parts: Parts) -> dict[str, object]:
    """Sources, indexes, token memory, queues and breakers."""
    memory, lookups = parts.tokens.memory, parts.lookups
    settings = parts.settings
    return {
        "sources": {
            "approximate": True,
            "precise": parts.streams is not None,
            "lookup": None if lookups.provider is None else lookups.provider.source.value,
        },
        "indexes": {name: index_status(parts, cluster) for name, cluster in parts.clusters.items()},
        "token_memory": {
            "entries": len(memory),
            "bytes": memory.held_bytes,
            "limit_bytes": settings.token_cache.max_bytes,
            "recalls": {name: getattr(memory.stats, name) for name in ("exact", "prefix", "missed")},
        },
        "snapshot": None if parts.warm is None else parts.warm.status(),
        "background": {
            "waiting": parts.background.waiting,
            "limit": settings.background.max_queue,
            "running": running_jobs(parts),
        },
        "breakers": parts.guard.states(),
        "troubles": troubles(parts),
        "switched_off": [f"{kind} at {instance}" for kind, instance in parts.upkeep.actions.switched_off],
        "bytes_per_token": parts.ratios.typical,
    }


def troubles(parts: Parts) -> list[dict[str, object]]:
    """What of the sources and services does not work, the longest first.

    `kind` is `service` (of `what`: lookup, tokenize, pin, ...) or `event_stream` (of `what`: an endpoint's rank).
    """
    now = parts.guard.now()
    found: list[dict[str, object]] = [
        {
            "kind": "service",
            "cluster": None,
            "endpoint": None,
            "what": outage.operation,
            "for_s": now - outage.since,
            "last_error": outage.last_error,
            "meaning": outage.meaning,
        }
        for outage in parts.guard.outages
    ]
    found += [
        {
            "kind": "event_stream",
            "cluster": one.cluster,
            "endpoint": str(one.endpoint),
            "what": f"{one.endpoint}/{one.dp_rank}",
            "for_s": one.for_s,
            "last_error": one.status.reason.value,
            "meaning": "what was routed there counts until its KV events are complete again",
        }
        for one in (() if parts.streams is None else parts.streams.troubles())
    ]
    return sorted(found, key=lambda one: -float(str(one["for_s"])))


def index_status(parts: Parts, cluster: Cluster) -> dict[str, object]:
    """One cluster's indexes: size, estimated memory, and each endpoint's part."""
    local = parts.local[cluster.name]
    rows = sum(local.precise.rows(endpoint.id) for endpoint in cluster.endpoints)
    return {
        "approximate": {
            "entries": local.approximate.entries,
            "runs": local.approximate.runs,
            "estimated_bytes": local.approximate.estimated_bytes,
        },
        "precise": {"blocks": rows, "estimated_bytes": rows * PRECISE_ROW_BYTES},
        "hot": {"blocks": local.approximate.unique_blocks, "runs": local.approximate.runs},
        "endpoints": {str(one.id): endpoint_index(parts, cluster.name, one) for one in cluster.endpoints},
    }


def endpoint_index(parts: Parts, cluster: str, endpoint: Endpoint) -> dict[str, object]:
    """What is believed of one endpoint, and how far. Blocks of the approximate index are text, not tokens."""
    local = parts.local[cluster]
    streams = {} if parts.streams is None else parts.streams.streams(endpoint)
    return {
        "state": worth(streams).value,
        "streams": [
            {"rank": rank, "state": one.state.value, "reason": one.reason.value} for rank, one in streams.items()
        ],
        "approximate_blocks": local.approximate.held_blocks(endpoint.id),
        "approximate_capacity_blocks": local.approximate.capacity(endpoint.id),
        "told_capacity_blocks": local.capacities.reported(endpoint.id),
        "trust": shares(parts, cluster, endpoint.id),
        "hit_ratio": asdict(parts.learning.accounts.use((cluster, endpoint.id))),
        "block_bytes": TEXT_BLOCK_BYTES,
        "precise_blocks": local.precise.rows(endpoint.id),
    }


def engine_status(parts: Parts, endpoint: Endpoint) -> dict[str, object] | None:
    """What the engine's own metrics said last; None before that."""
    reading = parts.signals.reading(endpoint)
    if reading is None:
        return None
    age_s, metrics = reading
    cache = metrics.cache
    return {
        "age_s": age_s,
        "kv_usage": metrics.kv_usage,
        "waiting": metrics.waiting,
        "running": metrics.running,
        "capacity_tokens": None if cache is None else cache.capacity_tokens,
        "prefix_caching": None if cache is None else cache.prefix_caching,
    }


def worth(streams: dict[int, StreamStatus]) -> StreamState:
    """What an index fed by these streams is worth; without any, only what was routed is known."""
    if not streams:
        return StreamState.APPROXIMATE
    states = {one.state for one in streams.values()}
    return next((state for state in _WORST_FIRST if state in states), StreamState.EXACT)


def leases(parts: Parts, now: float) -> list[dict[str, object]]:
    """Running pins."""
    pin = parts.upkeep.pin
    if pin is None:
        return []
    lasts_s = None if pin.counted else parts.settings.cache_strategy.pin_lease
    return [
        {
            "instance": instance,
            "prefix": lease.prefix.name,
            "model": lease.prefix.model,
            "tokens": lease.tokens,
            "age_s": now - lease.pinned_at,
            "lapses_in_s": None if lasts_s is None else lasts_s - (now - lease.pinned_at),
        }
        for (instance, _), lease in pin.leases(now).items()
    ]


def running_jobs(parts: Parts) -> list[dict[str, object]]:
    """Background work under way: what, and at which LMCache instance."""
    return [{"about": job.about, "instance": job.lane} for job in parts.background.running]
