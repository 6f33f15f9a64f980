"""Facts about an endpoint's engine."""

from __future__ import annotations

from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.priority.engine_priority import EndpointPriority, priority_of


def known_of(endpoint: Endpoint) -> EndpointPriority:
    """There is something known of every endpoint."""
    found = priority_of(endpoint)
    assert found is not None
    return found
