"""Metrics of warming."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class WarmingMetrics(MetricGroup):
    """Prompts sent to warm caches."""

    #: computed, found
    warmed_tokens = counter("kvproxy_kvcache_warmed_tokens", "Tokens of prompts sent to warm caches", "state")
