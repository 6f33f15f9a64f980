"""Decisions of a cluster, taken at once."""

from __future__ import annotations

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.screening import Refusal


def pick_endpoint(cluster: Cluster, request: PickRequest, now: float) -> Pick | None:
    """Decide and reserve; None when no endpoint may take the request."""
    decision = cluster.decide(request, now)
    return None if isinstance(decision, Refusal) else cluster.reserve(decision, now)
