"""Counts what a cluster decided, without looking labels up for every request."""

from __future__ import annotations

from kvproxy.metrics.catalog import Metrics
from kvproxy.metrics.collectors import CounterCell


class DecisionMetrics:
    """Children by reason; reasons are closed sets of the policy and the cluster."""

    def __init__(self, metrics: Metrics, cluster: str, policy: str) -> None:
        self._metrics = metrics
        self._cluster = cluster
        self._policy = policy
        self._decisions: dict[str, CounterCell] = {}
        self._preferences: dict[str, CounterCell] = {}

    def decision(self, reason: str) -> None:
        """A pick, or a refusal."""
        child = self._decisions.get(reason)
        if child is None:
            child = self._decisions[reason] = self._metrics.request.picks.labels(self._cluster, self._policy, reason)
        child.inc()

    def preference(self, result: str) -> None:
        """What became of a preferred endpoint."""
        child = self._preferences.get(result)
        if child is None:
            child = self._preferences[result] = self._metrics.request.preferences.labels(result)
        child.inc()
