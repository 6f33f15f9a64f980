"""How loaded a cluster is against what is wanted, and how many endpoints it should have: for whatever scales it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.router_queue import RouterQueue
from kvproxy.config.cluster_schema import ClusterSettings
from kvproxy.routing.demand import Demand
from kvproxy.routing.load import Reservation
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.work import seconds_of

TAKING = (Condition.UP, Condition.SATURATED)


class Scaled(Protocol):
    """The cluster, as its scaling sees it."""

    settings: ClusterSettings
    queue: RouterQueue | None

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...
    @property
    def speeds(self) -> SpeedModel | None: ...


class Autoscaling:
    """By this process's own requests alone, so that the figures of several add up. None where no speeds are learned."""

    def __init__(self, cluster: Scaled) -> None:
        self._cluster = cluster
        self._demand = Demand()

    def placed(self, reservation: Reservation, speeds: SpeedModel, now: float) -> None:
        """A request has its place, in a cluster whose speeds are learned."""
        if self._demand.placed(seconds_of(reservation.features, speeds.seconds), now):
            self._demand.sample(self._backlog_s(speeds, now), now)

    def saturation(self, now: float) -> float | None:
        """Prefill seconds that wait, an endpoint (at least one is reckoned with), over the wanted wait."""
        speeds = self._cluster.speeds
        if speeds is None:
            return None
        taking = sum(endpoint.condition(now) in TAKING for endpoint in self._cluster.endpoints)
        return self._backlog_s(speeds, now) / max(1, taking) / self._cluster.settings.autoscaling.wanted_wait

    def wanted_endpoints(self, now: float) -> float | None:
        """Not rounded."""
        cluster, speeds = self._cluster, self._cluster.speeds
        if speeds is None:
            return None
        settings = cluster.settings.autoscaling
        busy = any(endpoint.load.own_in_flight for endpoint in cluster.endpoints) or bool(cluster.queue)
        return self._demand.wanted(
            self._backlog_s(speeds, now),
            now,
            wanted_wait_s=settings.wanted_wait,
            busy=busy,
            most=settings.max_endpoints,
        )

    def _backlog_s(self, speeds: SpeedModel, now: float) -> float:
        """Of all endpoints, and in front of them."""
        pending_s = 0.0 if self._cluster.queue is None else self._cluster.queue.pending_s
        for endpoint in self._cluster.endpoints:
            if endpoint.load.own_in_flight:
                slowness = speeds.slowness(endpoint.id, now)
                work = endpoint.load.own_work(speeds.seconds, slowness, now)
                pending_s += slowness * seconds_of(work, speeds.seconds)
        return pending_s
