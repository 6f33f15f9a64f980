"""Metrics of hygiene."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class PrefixBreakMetrics(MetricGroup):
    """Metrics of broken prefixes."""

    labels = {
        "cause": "why the prompt of a returning session could not be reused "
        "([the list](../kvproxy/features/hygiene/README.md))",
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.prefix_break_tokens = Counter(
            "kvproxy_prefix_break_tokens",
            "Prompt tokens computed again although the session had sent them before",
            ["cause", "client"],
            registry=r,
        )
