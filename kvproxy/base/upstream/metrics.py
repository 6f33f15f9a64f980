"""Metrics of connections."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class ConnectionMetrics(MetricGroup):
    """Connections to endpoints."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.connections = Gauge("kvproxy_upstream_connections", "Connections", ["state"], registry=r)
        self.connects = Counter("kvproxy_upstream_connects", "Connections tried", ["outcome"], registry=r)
        self.replays = Counter(
            "kvproxy_upstream_replays", "Requests sent again because a kept connection was dead", registry=r
        )
