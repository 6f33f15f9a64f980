"""Metrics of normalize."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class NormalizeMetrics(MetricGroup):
    """Prompts rewritten to be reusable."""

    labels = {
        "rules": "those of `normalize` that change a prompt, such as `billing_header+sort_tools`",
    }

    #: rewritten, failed
    normalized = counter(
        "kvproxy_normalized_requests", "Requests with a prompt that rules of `normalize` change", "cluster rules result"
    )
