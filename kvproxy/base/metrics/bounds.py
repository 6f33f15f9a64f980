"""Metrics of bounded places."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup


class BoundMetrics(MetricGroup):
    """Bounds: entries held, and their limits."""

    across = {
        "kvproxy_breaker_open": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.queue_depth = Gauge("kvproxy_queue_depth", "Entries held in a bounded place", ["queue"], registry=r)
        self.queue_limit = Gauge("kvproxy_queue_limit", "Bound of that place", ["queue"], registry=r)
        self.breaker_state = Gauge("kvproxy_breaker_open", "1: open or half open", ["breaker"], registry=r)

    def show_queue(self, name: str, depth: Callable[[], float], *, limit: float) -> None:
        """Bind a queue's depth, read at each scrape, and set its limit."""
        self.queue_depth.labels(name).set_function(depth)
        self.queue_limit.labels(name).set(limit)
