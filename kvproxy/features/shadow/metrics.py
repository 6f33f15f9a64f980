"""Metrics of the shadow policy."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter, histogram
from kvproxy.cluster.metrics import COST_BUCKETS


class ShadowMetrics(MetricGroup):
    """Decisions of shadow policies."""

    labels = {"by": "whose costs (`live` or `shadow`)"}

    #: same, different, error, skipped (too many a second)
    shadow_decisions = counter(
        "kvproxy_shadow_decisions", "Decisions of a shadow policy against the live one", "cluster policy result"
    )
    shadow_cost_difference = histogram(
        "kvproxy_shadow_cost_difference",
        "Where they differ: what the other's endpoint would cost more by the costs of `by`, in that policy's unit",
        "cluster policy by",
        buckets=COST_BUCKETS,
    )
