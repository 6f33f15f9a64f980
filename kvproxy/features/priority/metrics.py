"""Metrics of engine priority."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, counter, gauge


class EnginePriorityMetrics(MetricGroup):
    """Priorities that engines are given."""

    #: sent, refused
    engine_priority_requests = counter(
        "kvproxy_engine_priority_requests",
        "Requests with the number by which engines order their queue",
        "cluster endpoint outcome",
    )
    #: accepted, refused
    engine_priority_state = gauge(
        "kvproxy_engine_priority_state",
        "1: this is the engine's state, if it gets a priority",
        "cluster endpoint state",
        across=Across.MAX,
    )
