"""Metrics of the sessions in the engines' memory."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter


class SessionMetrics(MetricGroup):
    """Residents, those that wait, and those that are known."""

    residents = callback_gauge(
        "kvproxy_resident_sessions",
        "Sessions whose contexts an endpoint's memory is to keep between their turns",
        "cluster endpoint",
        across=Across.MAX,
    )
    context_tokens = callback_gauge(
        "kvproxy_resident_context_tokens",
        "Tokens of these contexts with room for a turn more, shared prefixes once",
        "cluster endpoint",
        across=Across.MAX,
    )
    limit_tokens = callback_gauge(
        "kvproxy_resident_limit_tokens",
        "Such tokens up to which new sessions are admitted, which growth may exceed; none: there is no limit",
        "cluster endpoint",
        across=Across.MAX,
    )
    #: known, waiting
    entries = callback_gauge(
        "kvproxy_sessions_entries",
        "Sessions that are known (at most 65,536) and sessions that wait for room",
        "cluster kind",
    )
    expected_wait = callback_gauge(
        "kvproxy_sessions_expected_wait_seconds",
        "Wait of a session that begins now, by the rate at which room becomes free; at first, what another has waited",
        "cluster",
        across=Across.MAX,
    )
    gave_way = counter(
        "kvproxy_sessions_gave_way", "Residents that gave up their room to the growth of others", "cluster"
    )
