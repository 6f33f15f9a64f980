"""Metrics of the shadow policy."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter, Histogram
from kvproxy.base.metrics.groups import MetricGroup
from kvproxy.cluster.metrics import COST_BUCKETS


class ShadowMetrics(MetricGroup):
    """Decisions of shadow policies."""

    labels = {"by": "whose costs (`live` or `shadow`)"}

    def __init__(self, r: CollectorRegistry) -> None:
        self.shadow_decisions = Counter(
            "kvproxy_shadow_decisions",
            "Decisions of a shadow policy against the live one",
            ["cluster", "policy", "result"],
            registry=r,
        )  # same, different, error, skipped (too many a second)
        self.shadow_cost_difference = Histogram(
            "kvproxy_shadow_cost_difference",
            "Where they differ: what the other's endpoint would cost more by the costs of `by`, in that policy's unit",
            ["cluster", "policy", "by"],
            buckets=COST_BUCKETS,
            registry=r,
        )
