"""How loaded a cluster is against what is wanted, and how many endpoints it should have, for whatever scales it: by the
prefill that comes, and by the prefill that waits.

An endpoint that gets `a` seconds of prefill a second, `b` square seconds in squares, is busy for the share `a` of the
time, and a request finds `b / (2 (1 - a))` seconds waiting (Pollaczek and Khinchine). Of `n` endpoints each gets an
n-th: the wait is the wanted one, `w`, at `n = a + b / (2 w)` for all that comes. A backlog asks for more until it is
gone: `n = backlog / w`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import Clock
from kvproxy.cluster.endpoint import TAKING
from kvproxy.cluster.feature import ClusterObserver, ListClusters, ObservedCluster
from kvproxy.cluster.routing.load import Reservation, own_work
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import seconds_of
from kvproxy.features.autoscaling.metrics import ScalingMetrics
from kvproxy.features.autoscaling.settings import AutoscalingPlace, AutoscalingSettings

#: Time constant of past demand and of a vanished backlog; a growing one counts sooner.
_FALL_S = 60.0
_RISE_S = 10.0
#: Step in which past demand decays.
_STEP_S = 0.1
#: Interval of backlog samples.
SAMPLE_S = 1.0
#: Endpoints wanted at most.
MAX_WANTED = 100
#: Backlog of an endpoint that counts as none, if no request is in flight.
_NOTHING = 0.01


class Autoscaling(ClusterObserver):
    """By this process's own requests alone, so that the figures of several add up. None where no speeds are learned."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster = cluster
        self._demand = Demand()

    @property
    def _settings(self) -> AutoscalingSettings:
        """A reload may have changed them."""
        return part_of(self._cluster.settings, AutoscalingPlace).autoscaling

    def placed(self, reservation: Reservation, speeds: SpeedModel, now: float) -> None:
        """Count a placed request in a cluster whose speeds are learned."""
        requests, tokens, attention, onboarding = reservation.features
        a, b, c, d = speeds.seconds  # not seconds_of: this runs for every placement
        if self._demand.placed(requests * a + tokens * b + attention * c + onboarding * d, now):
            self._demand.sample(self._backlog_s(speeds, now), now)

    def saturation(self, now: float) -> float | None:
        """Prefill seconds that wait, an endpoint (at least one is reckoned with), over the wanted wait."""
        speeds = self._cluster.speeds
        if speeds is None:
            return None
        taking = sum(endpoint.condition(now) in TAKING for endpoint in self._cluster.endpoints)
        return self._backlog_s(speeds, now) / max(1, taking) / self._settings.wanted_wait

    def wanted_endpoints(self, now: float) -> float | None:
        """Not rounded."""
        cluster = self._cluster
        speeds = self._cluster.speeds
        if speeds is None:
            return None
        busy = any(endpoint.load.own_in_flight for endpoint in cluster.endpoints) or bool(cluster.queue)
        return self._demand.wanted(
            self._backlog_s(speeds, now),
            now,
            wanted_wait_s=self._settings.wanted_wait,
            busy=busy,
            most=MAX_WANTED,
        )

    def _backlog_s(self, speeds: SpeedModel, now: float) -> float:
        """Of all endpoints, and in front of them."""
        pending_s = 0.0 if self._cluster.queue is None else self._cluster.queue.pending_s
        for endpoint in self._cluster.endpoints:
            if endpoint.load.own_in_flight:
                slowness = speeds.slowness(endpoint.id, now)
                work = own_work(endpoint.load, speeds.seconds, slowness, now)
                pending_s += slowness * seconds_of(work, speeds.seconds)
        return pending_s


def show_scaling(metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
    """Read at every scrape; clusters whose speeds are not learned have no series."""

    def series(value: Callable[[Autoscaling, float], float | None]) -> Iterator[tuple[tuple[str, ...], float]]:
        for cluster in clusters():
            for one in cluster.observers:
                found = value(one, clock()) if isinstance(one, Autoscaling) else None
                if found is not None:
                    yield (cluster.name,), found

    group = metrics.group(ScalingMetrics)
    group.saturation.set_source(lambda: series(Autoscaling.saturation))
    group.wanted_endpoints.set_source(lambda: series(Autoscaling.wanted_endpoints))


class Demand:
    """Sums that forget what is long ago. The time never goes back; `wanted` changes nothing, and may be asked in
    another thread."""

    def __init__(self) -> None:
        self._work = 0.0  # prefill seconds a second
        self._squares = 0.0
        self._at = 0.0
        self._backlog_s = 0.0
        self._sampled_at = -math.inf

    def placed(self, own_s: float, now: float) -> bool:
        """Count a request with this prefill; returns True if the backlog is due for a sample."""
        if now > self._at + _STEP_S:  # not for every request
            kept = math.exp((self._at - now) / _FALL_S)
            self._work *= kept
            self._squares *= kept
            self._at = now
        rate = own_s / _FALL_S
        self._work += rate
        self._squares += rate * own_s
        return now - self._sampled_at >= SAMPLE_S

    def sample(self, backlog_s: float, now: float) -> None:
        """So much waits now, over all endpoints and in front of them."""
        self._backlog_s = self._smoothed(backlog_s, now)
        self._sampled_at = now

    def wanted(self, backlog_s: float, now: float, *, wanted_wait_s: float, busy: bool, most: int) -> float:
        """Endpoints, not rounded; `busy`: a request is in flight or waits, so that there is to be one at least."""
        kept = math.exp((self._at - now) / _FALL_S) if now > self._at else 1.0
        by_arrivals = kept * (self._work + self._squares / (2 * wanted_wait_s))
        by_backlog = self._smoothed(backlog_s, now) / wanted_wait_s
        wanted = max(by_arrivals, by_backlog)
        if wanted < _NOTHING:
            return _NOTHING if busy else 0.0
        return min(wanted, most)

    def _smoothed(self, backlog_s: float, now: float) -> float:
        elapsed_s = now - self._sampled_at
        if math.isinf(elapsed_s):
            return backlog_s
        over_s = _RISE_S if backlog_s > self._backlog_s else _FALL_S
        return backlog_s + (self._backlog_s - backlog_s) * math.exp(-max(0.0, elapsed_s) / over_s)
