"""Metrics of normalize."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class NormalizeMetrics(MetricGroup):
    """Prompts rewritten to be reusable."""

    across = {
        "kvproxy_normalize_state": Across.MAX,
    }
    labels = {
        "rules": "those of `normalize` that change a prompt, such as `billing_header+sort_tools`",
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.normalized = Counter(
            "kvproxy_normalized_requests",
            "Requests with a prompt that rules of `normalize` change",
            ["cluster", "rules", "result"],
            registry=r,
        )  # rewritten, left, failed
        self.normalize_state = Gauge(
            "kvproxy_normalize_state",
            "1: this is the state of the rules on the cluster's traffic",
            ["cluster", "rules", "state"],
            registry=r,
        )  # trying, on, off
