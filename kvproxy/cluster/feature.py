"""Features, as far as clusters meet them: sources of endpoints, observers of decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

from kvproxy.base.feature import BaseFeature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock, Sleep
    from kvproxy.cluster.discovery_settings import DiscoverySettings
    from kvproxy.cluster.endpoint import Endpoint
    from kvproxy.cluster.router_queue import RouterQueue
    from kvproxy.cluster.routing.load import Reservation
    from kvproxy.cluster.routing.speeds import SpeedModel
    from kvproxy.cluster.settings import ClusterSettings
    from kvproxy.cluster.sources.protocols import WatchedDiscovery


class ClusterObserver:
    """Observes one cluster as long as it lives; hooks that a class does not override are not called."""

    def placed(self, reservation: Reservation, speeds: SpeedModel, now: float) -> None:
        """A request has its place, in a cluster whose speeds are learned. In the turn of the decision: no wait."""


class ObservedCluster(Protocol):
    """A cluster, as features see it."""

    name: str
    settings: ClusterSettings
    queue: RouterQueue | None
    observers: Sequence[ClusterObserver]

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...
    @property
    def speeds(self) -> SpeedModel | None: ...


#: The clusters there are, asked at each scrape: a reload may replace any.
ListClusters = Callable[[], Iterable[ObservedCluster]]


class ClusterFeature(BaseFeature):
    """What a feature adds to clusters."""

    def list_sources(
        self, discovery: DiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep
    ) -> Mapping[str, WatchedDiscovery]:
        """Return sources of endpoints by name, those that these settings ask for."""
        return {}

    def observe_cluster(self, cluster: ObservedCluster) -> ClusterObserver | None:
        """Its observer of this cluster, which is being made; None: it has none."""
        return None

    def show_clusters(self, metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
        """Bind its gauges, once for a process: they read the clusters there are at each scrape."""
