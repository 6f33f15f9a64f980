"""Metrics of the sample."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class GreetingMetrics(MetricGroup):
    """Greetings."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.sent = Counter("kvproxy_greetings", "Answers with a greeting", registry=r)
