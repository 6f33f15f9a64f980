"""Metrics of the sample."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class GreetingMetrics(MetricGroup):
    """Greetings."""

    sent = counter("kvproxy_greetings", "Answers with a greeting")
