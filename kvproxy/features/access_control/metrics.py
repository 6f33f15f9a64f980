"""Metrics of auth and rate_limit."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class AccessMetrics(MetricGroup):
    """Requests refused before they are read."""

    rate_limited = counter("kvproxy_rate_limited", "Requests refused by rate_limit", "kind")
    auth_failures = counter("kvproxy_auth_failures", "Requests refused by auth", "reason")
