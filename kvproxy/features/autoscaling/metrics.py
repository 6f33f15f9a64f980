"""Metrics of autoscaling."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import CallbackGauge
from kvproxy.base.metrics.groups import MetricGroup


class ScalingMetrics(MetricGroup):
    """How many endpoints are wanted."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.saturation = CallbackGauge(
            "kvproxy_saturation",
            "Prefill seconds waiting per endpoint, over `autoscaling.wanted_wait`; no series without learned speeds",
            ["cluster"],
            registry=r,
        )
        self.wanted_endpoints = CallbackGauge(
            "kvproxy_wanted_endpoints",
            "Endpoints that would bring this to 1, smoothed; to be rounded up, after the sum over all proxies",
            ["cluster"],
            registry=r,
        )
