"""Metrics of warming."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class WarmingMetrics(MetricGroup):
    """Prompts sent to warm caches."""

    labels = {"action": "`warm`"}

    def __init__(self, r: CollectorRegistry) -> None:
        self.warmed_tokens = Counter(
            "kvproxy_kvcache_warmed_tokens", "Tokens of prompts sent to warm caches", ["state"], registry=r
        )  # computed, found
