"""Metrics of hedging."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class HedgeMetrics(MetricGroup):
    """Requests that were late."""

    #: won (the second endpoint answered first), lost, failed (neither answered), left (the client did not wait),
    #: refused (no attempt or retry budget was left)
    results = counter(
        "kvproxy_hedges", "Late streams that were sent to a second endpoint, or could not be", "cluster result"
    )
