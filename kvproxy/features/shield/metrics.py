"""Metrics of shield."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter


class ShieldMetrics(MetricGroup):
    """Requests that would harm an engine."""

    labels = {
        "action": "of requests: `passed`, `rerouted`, `refused` or `rewritten`",
        "rule": "a fault of [the shield's table](../kvproxy/features/shield/README.md), or `unreadable`",
    }

    #: passed, rerouted, refused, rewritten
    requests = counter(
        "kvproxy_shield_requests", "Requests that would harm an engine that might have served them", "rule action"
    )
    affected = callback_gauge(
        "kvproxy_shield_affected_engines",
        "Engines with a known fault, by their version",
        "cluster rule",
        across=Across.MAX,
    )
    unknown = callback_gauge(
        "kvproxy_shield_unknown_engines", "Engines that do not report their version", "cluster", across=Across.MAX
    )
