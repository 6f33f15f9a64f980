"""Metrics of autoscaling."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, callback_gauge


class ScalingMetrics(MetricGroup):
    """How many endpoints are wanted."""

    saturation = callback_gauge(
        "kvproxy_saturation",
        "Prefill seconds waiting per endpoint, over `autoscaling.wanted_wait`; no series without learned speeds",
        "cluster",
    )
    wanted_endpoints = callback_gauge(
        "kvproxy_wanted_endpoints",
        "Endpoints that would bring this to 1, smoothed; to be rounded up, after the sum over all proxies",
        "cluster",
    )
