"""Metrics of normalize."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, counter, gauge


class NormalizeMetrics(MetricGroup):
    """Prompts rewritten to be reusable."""

    labels = {
        "rules": "those of `normalize` that change a prompt, such as `billing_header+sort_tools`",
    }

    #: rewritten, left, failed
    normalized = counter(
        "kvproxy_normalized_requests", "Requests with a prompt that rules of `normalize` change", "cluster rules result"
    )
    #: trying, on, off
    normalize_state = gauge(
        "kvproxy_normalize_state",
        "1: this is the state of the rules on the cluster's traffic",
        "cluster rules state",
        across=Across.MAX,
    )
