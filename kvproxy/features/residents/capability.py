"""Text for people whether sessions are admitted, and how many there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.features.residents.settings import SessionsPlace
from kvproxy.operate.config.schema import find_kvcache_settings
from kvproxy.operate.feature import OFF, ON, Capability

if TYPE_CHECKING:
    from kvproxy.cluster.feature import ObservedCluster
    from kvproxy.operate.config.schema import Config

_NAME = "sessions admitted by memory"


def admits_sessions(cluster: ClusterSettings) -> bool:
    """Return whether sessions of a cluster wait for room."""
    return cluster.queues and part_of(cluster, SessionsPlace).admit_sessions


def describe_capability(config: Config, clusters: Iterable[ObservedCluster] | None) -> Capability:
    """Return whether sessions are admitted, and why that has no effect where the memory is not known."""
    queued = [one for one in config.clusters.values() if one.queues]
    if not any(map(admits_sessions, queued)):
        if not queued:
            return Capability(_NAME, OFF, "the router queue is off")
        gain = "`admit_sessions: true` keeps agents beyond the engines' memory fast"
        return Capability(_NAME, OFF, "`admit_sessions: false`", gain)
    if clusters is None:
        kvcache = find_kvcache_settings(config)
        if kvcache is None or not kvcache.engine_metrics_interval:
            return Capability(_NAME, ON, "no effect: the engines' KV memory is not read (`engine_metrics_interval`)")
        return Capability(_NAME, ON, "the default; no effect while all sessions fit")
    from kvproxy.features.residents.cluster_sessions import find_sessions  # `kvproxy check` needs no router

    shown = [one.describe() for one in find_sessions(clusters)]
    if not any(one["memory_known"] for one in shown):
        return Capability(_NAME, ON, "no effect: no engine reports its KV memory (`engine_metrics_interval`)")
    total = {key: sum(int(str(one[key])) for one in shown) for key in ("residents", "waiting")}
    return Capability(_NAME, ON, f"{total['residents']} resident now, {total['waiting']} wait for room")
