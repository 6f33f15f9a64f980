"""Leases of reservations: they run out, they are bounded, and no endpoint is blamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.operate.placing.reservations import PickReservation, Reservations
from tests.operate.admin.support import proxy_of
from tests.support.picks import pick_endpoint


@dataclass
class FakeTimer:
    """Runs out when a test says so."""

    delay_s: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Timers:
    """All that were started."""

    started: list[FakeTimer] = field(default_factory=list)

    def later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        self.started.append(FakeTimer(delay_s, callback))
        return self.started[-1]


def held(reservations: Reservations, cluster: Cluster) -> PickReservation:
    """One more reservation for a minute."""
    pick = pick_endpoint(cluster, PickRequest(), now=0.0)
    assert pick is not None
    return reservations.hold_pick(cluster, pick, lease_s=60.0)


def test_a_lease_that_runs_out_frees_the_place_and_blames_nobody() -> None:
    """Settling it later says that it is gone."""
    proxy, timers = proxy_of(), Timers()
    cluster = proxy.clusters["default"]
    reservations = Reservations(metrics=proxy.metrics, clock=proxy.clock, later=timers.later)
    first, second = held(reservations, cluster), held(reservations, cluster)
    assert timers.started[0].delay_s == 60.0
    timers.started[0].callback()
    endpoint = cluster.endpoints[0]
    assert not timers.started[1].cancelled
    assert (len(reservations), endpoint.load.in_flight, endpoint.health.failures) == (1, 1, 0)
    assert not reservations.first_token(first.id)
    assert reservations.first_token(second.id)
    timers.started[0].callback()  # too late for anything
    assert len(reservations) == 1
    value = proxy.metrics.registry.get_sample_value("kvproxy_pick_reservations_total", {"result": "expired"})
    assert value == 1.0
    assert reservations.end_pick(second.id, AttemptOutcome.SUCCESS) is second
    assert timers.started[1].cancelled  # nothing of it is kept for the rest of its lease


def test_a_lease_that_runs_out_speaks_for_nobody_either() -> None:
    """An endpoint that failed before has not served a request for it."""
    proxy, timers = proxy_of(), Timers()
    cluster = proxy.clusters["default"]
    reservations = Reservations(metrics=proxy.metrics, clock=proxy.clock, later=timers.later)
    held(reservations, cluster)
    cluster.endpoints[0].health.record_failure(proxy.clock())
    timers.started[0].callback()
    assert cluster.endpoints[0].health.failures == 1


def test_reservations_are_bounded_and_seen() -> None:
    """Depth and bound are gauges; ids differ."""
    proxy = proxy_of()
    reservations = Reservations(metrics=proxy.metrics, clock=proxy.clock, later=Timers().later, limit=2)
    ids = {held(reservations, proxy.clusters["default"]).id for _ in range(2)}
    assert len(ids) == 2
    assert reservations.full
    read = proxy.metrics.registry.get_sample_value
    gauges = [read(f"kvproxy_queue_{each}", {"queue": "picks"}) for each in ("depth", "limit")]
    assert gauges == [2.0, 2.0]
