"""Metrics of shield."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup


class ShieldMetrics(MetricGroup):
    """Requests that would harm an engine."""

    across = {
        "kvproxy_shield_affected_engines": Across.MAX,
        "kvproxy_shield_unknown_engines": Across.MAX,
    }
    labels = {
        "action": "of requests: `passed`, `rerouted`, `refused` or `rewritten`",
        "rule": "a fault of [the shield's table](../kvproxy/features/shield/README.md), or `unreadable`",
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvproxy_shield_requests",
            "Requests that would harm an engine that might have served them",
            ["rule", "action"],
            registry=r,
        )  # passed, rerouted, refused, rewritten
        self.affected = CallbackGauge(
            "kvproxy_shield_affected_engines",
            "Engines with a known fault, by their version",
            ["cluster", "rule"],
            registry=r,
        )
        self.unknown = CallbackGauge(
            "kvproxy_shield_unknown_engines", "Engines that do not report their version", ["cluster"], registry=r
        )
