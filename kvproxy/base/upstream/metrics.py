"""Metrics of connections."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter, gauge


class ConnectionMetrics(MetricGroup):
    """Connections to endpoints."""

    connections = gauge("kvproxy_upstream_connections", "Connections", "state")
    connects = counter("kvproxy_upstream_connects", "Connections tried", "outcome")
    replays = counter("kvproxy_upstream_replays", "Requests sent again because a kept connection was dead")
