"""Metrics of the sessions in the engines' memory."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup


class SessionMetrics(MetricGroup):
    """Residents, those that wait, and those that are known."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.residents = CallbackGauge(
            "kvproxy_resident_sessions",
            "Sessions whose contexts an endpoint's memory is to keep between their turns",
            ["cluster", "endpoint"],
            registry=r,
        )
        self.context_tokens = CallbackGauge(
            "kvproxy_resident_context_tokens",
            "Tokens of these contexts with room for a turn more, shared prefixes once",
            ["cluster", "endpoint"],
            registry=r,
        )
        self.entries = CallbackGauge(
            "kvproxy_sessions_entries",
            "Sessions that are known (at most 65,536) and sessions that wait for room",
            ["cluster", "kind"],
            registry=r,
        )  # known, waiting
        self.gave_way = Counter(
            "kvproxy_sessions_gave_way",
            "Residents that gave up their room to the growth of others",
            ["cluster"],
            registry=r,
        )
