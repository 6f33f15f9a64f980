"""Status of the cache service, in all and by endpoint, as plain data for people. Reads only; hashes, never prompts."""

from __future__ import annotations

import asyncio
import heapq

import msgspec

from kvproxy.base.background_task import SLICE_S, in_slices
from kvproxy.base.types import Sleep
from kvproxy.cache.actions.job_queue import MAX_WAITING
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.overlap.gauges import PRECISE_ROW_BYTES
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.operate.admin.replies import encode_part


async def cache_status(service: KvCache) -> dict[str, object]:
    """Return sources, indexes, token memory, queues and breakers."""
    overlap = service.overlap
    settings = service.settings
    memory = overlap.tokens.memory
    return {
        "sources": {
            "approximate": True,
            "precise": any(one.followed.any for one in overlap.indexes.values()),
            "lookup": overlap.store.source,
        },
        "indexes": {name: await _index_status(service, cluster) for name, cluster in list(service.clusters.items())},
        "token_memory": {
            "entries": len(memory),
            "bytes": memory.held_bytes,
            "limit_bytes": settings.token_cache.max_bytes,
            "recalls": {name: getattr(memory.stats, name) for name in ("exact", "prefix", "missed")},
        },
        "background": {
            "waiting": service.actions.jobs.waiting,
            "limit": MAX_WAITING,
            "running": running_jobs(service),
        },
        "breakers": service.breakers.states(),
        "troubles": troubles(service),
        "bytes_per_token": service.state.bytes_per_token.typical,
    }


def troubles(service: KvCache) -> list[dict[str, object]]:
    """Return what of the sources and services does not work, the longest first.

    `kind` is `service` (of `what`: lookup, tokenize, pin, ...) or `event_stream` (of `what`: an endpoint's rank).
    """
    now = service.breakers.now()
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
        for outage in service.breakers.outages
    ]
    found += [
        {
            "kind": "event_stream",
            "cluster": one.cluster,
            "endpoint": str(one.endpoint),
            "what": f"{one.endpoint}/{one.dp_rank}",
            "for_s": one.for_s,
            "last_error": one.reason,
            "meaning": "routed requests count until its KV events are complete again",
        }
        for one in service.overlap.reports.find_troubles()
    ]
    return sorted(found, key=lambda one: -float(str(one["for_s"])))


def running_jobs(service: KvCache) -> list[dict[str, object]]:
    """Background work under way: what, and at which instance of the store."""
    return [{"about": job.about, "instance": job.lane} for job in service.actions.jobs.running]


async def hot_prefixes(
    service: KvCache, limit: int, *, slice_s: float = SLICE_S, sleep: Sleep = asyncio.sleep
) -> list[dict[str, object]]:
    """At most `limit` prefixes, the most touched first: hash of the last block, length, touches (decayed), and by
    endpoint how many of their blocks it is estimated to hold. Looks at every run there is, so it does so in slices."""
    indexes = service.overlap.indexes
    found: list[tuple[float, int, str, Run]] = []  # a heap, with a number so that runs are not compared
    runs = ((cluster, run) for cluster, one in indexes.items() for run in one.approximate.counts.all_runs())
    async for number, (cluster, run) in in_slices(enumerate(runs), slice_s=slice_s, sleep=sleep):
        entry = (indexes[cluster].approximate.counts.requests(run), -number, cluster, run)
        if len(found) < limit:
            heapq.heappush(found, entry)
        elif entry[0] > found[0][0]:
            heapq.heapreplace(found, entry)
    found.sort(reverse=True)
    # Entries of an early slice may be gone by now.
    present = [(cluster, run, indexes[cluster].approximate.counts.requests(run)) for _, _, cluster, run in found]
    return [_hot_prefix(service, cluster, run, touches) for cluster, run, touches in present if touches > 0.0]


def _hot_prefix(service: KvCache, cluster: str, run: Run, touches: float) -> dict[str, object]:
    indexes = service.overlap.indexes[cluster]
    hashes = indexes.approximate.counts.prefix(run)
    held = indexes.approximate.lookup(indexes.approximate.locate(hashes))
    return {
        "cluster": cluster,
        "prefix": f"{hashes[-1]:016x}",
        "blocks": len(hashes),
        "estimated_tokens": int(len(hashes) * TEXT_BLOCK_BYTES / service.state.bytes_per_token.typical),
        "touches": touches,
        "hot": touches >= indexes.hot.threshold,
        "replicas": {str(endpoint): blocks for endpoint, blocks in held.items()},
    }


async def _index_status(service: KvCache, cluster: Cluster) -> dict[str, object]:
    """One cluster's indexes: size, estimated memory, and each endpoint's part as JSON."""
    indexes = service.overlap.indexes[cluster.name]
    rows = 0
    endpoints: dict[str, msgspec.Raw] = {}
    async for one in in_slices(cluster.endpoints):
        rows += indexes.precise.count_rows(one.id)
        endpoints[str(one.id)] = encode_part(endpoint_index(service, cluster.name, one))
    return {
        "approximate": {
            "entries": indexes.approximate.counts.entries,
            "runs": indexes.approximate.counts.runs,
            "estimated_bytes": indexes.approximate.counts.estimated_bytes,
        },
        "precise": {"blocks": rows, "estimated_bytes": rows * PRECISE_ROW_BYTES},
        "hot": {"blocks": indexes.approximate.counts.unique_blocks, "runs": indexes.approximate.counts.runs},
        "last_served": {"sessions": indexes.last_served.sessions, "responses": indexes.last_served.responses},
        "endpoints": endpoints,
    }


def endpoint_index(service: KvCache, cluster: str, endpoint: Endpoint) -> dict[str, object]:
    """Return what is trusted of one endpoint, and how far. Blocks of the approximate index are text, not tokens."""
    overlap = service.overlap
    indexes = overlap.indexes[cluster]
    loss = service.state.losses.latest_loss(cluster, endpoint.id)
    return {
        **overlap.reports.describe(endpoint),
        "events_believed": endpoint.id not in indexes.missed.doubted,
        "names_pairs": endpoint.id in indexes.followed.paired,
        "last_loss": None if loss is None else {"reason": loss.reason.value, "age_s": loss.age_s},
        "approximate_blocks": indexes.approximate.counts.held_blocks(endpoint.id),
        "approximate_capacity_blocks": indexes.approximate.counts.capacity(endpoint.id),
        "told_capacity_blocks": indexes.capacities.reported_blocks(endpoint.id),
        "reuse_step_tokens": indexes.steps.known.get(endpoint.id),
        "trust": overlap.trust(cluster, endpoint.id),
        "hit_ratio": msgspec.to_builtins(service.state.hit_ratios.read_shares((cluster, endpoint.id))),
        "block_bytes": TEXT_BLOCK_BYTES,
        "precise_blocks": indexes.precise.count_rows(endpoint.id),
        "tiers": overlap.tier_counts.describe(cluster, endpoint, overlap.store.memory),
    }


def engine_status(service: KvCache, endpoint: Endpoint) -> dict[str, object] | None:
    """Return the engine's last metrics; None before the first."""
    reading = service.scraper.signals.latest_scrape(endpoint)
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
