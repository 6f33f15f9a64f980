"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.features.sessions.settings import SessionsPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ObservedCluster
    from kvproxy.cluster.routing.admission import Admission


class Sessions(Feature):
    """Admits sessions instead of requests where the engines' memory is too small for all of them."""

    name = "sessions"
    settings = {ClusterSettings: (SessionsPlace,)}

    def make_admission(self, settings: ClusterSettings) -> Admission | None:
        """Return the rule, which needs no more than what a router sees."""
        from kvproxy.features.sessions.admission import SessionAdmission

        return SessionAdmission() if part_of(settings, SessionsPlace).admit_sessions else None

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Return the rule of one cluster, which the settings may switch at any reload."""
        from kvproxy.features.sessions.cluster_sessions import ClusterSessions

        return ClusterSessions(cluster)


FEATURE = Sessions()
