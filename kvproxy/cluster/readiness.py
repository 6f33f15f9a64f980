"""Whether clusters can serve: one answer for the admin listener and for load balancers of the public one."""

from __future__ import annotations

from collections.abc import Mapping

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition

TAKING = (Condition.UP, Condition.SATURATED)


def clusters_without_endpoint(clusters: Mapping[str, Cluster], now: float) -> list[str]:
    """Names of the clusters in which no endpoint takes traffic."""
    return sorted(name for name, cluster in clusters.items() if not _available(cluster, now))


def _available(cluster: Cluster, now: float) -> bool:
    return any(endpoint.condition(now) in TAKING for endpoint in cluster.endpoints)
