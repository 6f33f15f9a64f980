"""The rule of admission in a running cluster."""

from __future__ import annotations

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.feature import ClusterObserver, ObservedCluster
from kvproxy.features.sessions.admission import SessionAdmission
from kvproxy.features.sessions.settings import SessionsPlace


class ClusterSessions(ClusterObserver):
    """Observer of one cluster; what it knows of sessions outlives reloads."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster = cluster
        self.rule = SessionAdmission()

    @property
    def admission(self) -> SessionAdmission | None:
        """As of ClusterObserver."""
        return self.rule if part_of(self._cluster.settings, SessionsPlace).admit_sessions else None
