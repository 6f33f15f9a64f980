"""Metrics of hygiene."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class PrefixBreakMetrics(MetricGroup):
    """Metrics of broken prefixes."""

    labels = {
        "cause": "why the prompt of a returning session could not be reused "
        "([the list](../kvproxy/features/hygiene/README.md))",
    }

    prefix_break_tokens = counter(
        "kvproxy_prefix_break_tokens",
        "Prompt tokens computed again although the session had sent them before",
        "cause client",
    )
