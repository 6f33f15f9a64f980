"""Adaptive and optional capabilities of a proxy, whether each is on, and why: for `kvproxy check`, `kvproxy status` and
the page.

Pure: the configuration, and counts of a running proxy if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvproxy.base.installed import installed
from kvproxy.cache.feature import find_reports
from kvproxy.cache.settings import KvCacheSettings, has_store
from kvproxy.cluster.settings import AUTO, ClusterSettings
from kvproxy.operate.config.schema import Config, find_kvcache_settings
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:  # a running proxy, all of whose parts it knows
    from kvproxy.operate.runtime.operated import AdminTarget

NO_FILTER = "the kvcache filter is not in use"
_QUEUE = "`queue: {}` holds requests while every endpoint is busy"


@dataclass(frozen=True, slots=True)
class SeenEngines:
    """Counts of a running proxy's endpoints."""

    endpoints: int
    ranks: int  # endpoints that are single data-parallel ranks


def list_capabilities(
    config: Config, seen: SeenEngines | None = None, operated: AdminTarget | None = None
) -> list[Capability]:
    """Return all of them in a fixed order; without `seen` and `operated` what only a running proxy finds
    out is left open."""
    kvcache = find_kvcache_settings(config)
    found: list[Capability] = []
    for name, cluster in config.clusters.items():
        prefix = f"{name}: " if len(config.clusters) > 1 else ""
        found += [Capability(f"{prefix}router queue", *_describe_queue(cluster), gain=_QUEUE)]
    clusters = tuple(config.clusters.values())
    found.append(Capability("data-parallel ranks", *_describe_ranks(clusters, seen)))
    found += _describe_cache(kvcache)
    return found + [one for feature in installed(Feature) for one in feature.list_capabilities(config, operated)]


def list_gains(config: Config) -> list[str]:
    """Return one line for each capability that is off and would help: what brings it, and what for."""
    off = [f"{one.name}: {one.gain}" for one in list_capabilities(config) if one.state == OFF and one.gain]
    return ["not on, but would help:", *(f"  {line}" for line in off)] if off else []


def format_capabilities(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one line each: `router queue         on   auto: with kv_aware`."""
    width = max((len(one["name"]) for one in rows), default=0)
    return [f"{one['name']:<{width}}  {one['state']:<3}  {one['reason']}" for one in rows]


def _describe_queue(cluster: ClusterSettings) -> tuple[str, str]:
    if cluster.queue.enabled != AUTO:
        return (ON, "`queue`") if cluster.queues else (OFF, "`queue.enabled: false`")
    return (ON, "auto: with kv_aware") if cluster.queues else (OFF, f"auto: only with kv_aware, not {cluster.policy}")


def _describe_ranks(clusters: tuple[ClusterSettings, ...], seen: SeenEngines | None) -> tuple[str, str]:
    if not any(cluster.data_parallel.steer for cluster in clusters):
        return OFF, "`data_parallel.steer: false`"
    if seen is None:
        return ON, "where an engine has several"
    return (ON, f"{_count(seen.ranks, seen)} are ranks") if seen.ranks else (OFF, "no engine shows several")


def _describe_cache(kvcache: KvCacheSettings | None) -> Iterator[Capability]:
    """Yield what the kvcache filter alone decides."""
    if kvcache is None:
        yield Capability("tokenizer", OFF, NO_FILTER)
        return
    asks = has_store(kvcache) or find_reports(kvcache) is not None
    yield Capability(
        "tokenizer",
        ON if asks else OFF,
        "`/tokenize` before routing, where KV events or LMCache need ids" if asks else "neither KV events nor LMCache",
    )


def _count(number: int, seen: SeenEngines) -> str:
    return f"{number} of {seen.endpoints} endpoints"
