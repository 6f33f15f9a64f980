"""Metrics of auth and rate_limit."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class AccessMetrics(MetricGroup):
    """Requests refused before they are read."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.rate_limited = Counter("kvproxy_rate_limited", "Requests refused by rate_limit", ["kind"], registry=r)
        self.auth_failures = Counter("kvproxy_auth_failures", "Requests refused by auth", ["reason"], registry=r)
