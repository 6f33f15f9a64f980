"""Conditions of all endpoints at one time, read once for all that look at them."""

from __future__ import annotations

from collections.abc import Mapping

from kvproxy.base.background_task import in_slices
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint

#: By cluster, in the order of its endpoints.
Conditions = Mapping[str, Mapping[Endpoint, Condition]]


async def read_conditions(clusters: Mapping[str, Cluster], now: float) -> Conditions:
    """Return the conditions of all endpoints, of which thousands are read in slices."""
    return {
        name: {endpoint: endpoint.condition(now) async for endpoint in in_slices(cluster.endpoints)}
        for name, cluster in list(clusters.items())
    }
