"""Metrics of bounded places."""

from __future__ import annotations

from collections.abc import Callable

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, gauge


class BoundMetrics(MetricGroup):
    """Bounds: entries held, and their limits."""

    queue_depth = gauge("kvproxy_queue_depth", "Entries held in a bounded place", "queue")
    queue_limit = gauge("kvproxy_queue_limit", "Bound of that place", "queue")
    breaker_state = gauge("kvproxy_breaker_open", "1: open or half open", "breaker", across=Across.MAX)

    def show_queue(self, name: str, depth: Callable[[], float], *, limit: float) -> None:
        """Bind a queue's depth, read at each scrape, and set its limit."""
        self.queue_depth.labels(name).set_function(depth)
        self.queue_limit.labels(name).set(limit)
