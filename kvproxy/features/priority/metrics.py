"""Metrics of engine priority."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class EnginePriorityMetrics(MetricGroup):
    """Priorities that engines are given."""

    across = {
        "kvproxy_engine_priority_state": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.engine_priority_requests = Counter(
            "kvproxy_engine_priority_requests",
            "Requests with the number by which engines order their queue",
            ["cluster", "endpoint", "outcome"],
            registry=r,
        )  # sent, refused
        self.engine_priority_state = Gauge(
            "kvproxy_engine_priority_state",
            "1: this is the engine's state, if it gets a priority",
            ["cluster", "endpoint", "state"],
            registry=r,
        )  # unknown, obeys, ignores, refused, does_not_pay
