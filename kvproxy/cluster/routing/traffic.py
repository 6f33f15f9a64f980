"""A pool of candidates: how busy it is, how often it is asked, and which endpoint requests keep coming back to.

Asking changes nothing; placements do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import Candidate
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Features

#: After a window without requests new ones are counted over this much more than their time.
_BEGINNING_S = 1.0
#: The share of time that is prefill before anything is known. If it were none, the delay of others would count too
#: little at a start: its requests would wait for each other on few endpoints. It does not come back after a pause, when
#: caches differ already: with it, bursts of 25 and 100 requests 120 s apart, of five traces at loads 0.5 and 0.9, had
#: mean TTFTs of 0.987 to 1.009 times those without (geometric mean 0.999; p99 1.003).
_UNKNOWN_RHO = 0.5


class Pool:
    """One set of candidates by columns."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.ids = [candidate.id for candidate in candidates]
        self.loads = [candidate.load for candidate in candidates]
        self.weights = [candidate.weight for candidate in candidates]
        self.index_of = {endpoint: index for index, endpoint in enumerate(self.ids)}

    @cached_property
    def places(self) -> Sequence[int]:
        """Place of each in the order of their ids, which all routers share."""
        place_of = {endpoint: place for place, endpoint in enumerate(sorted(self.ids))}
        return [place_of[endpoint] for endpoint in self.ids]


class PoolSpeeds(msgspec.Struct, frozen=True):
    """The speeds of one pool at one moment."""

    pool: Pool
    model: SpeedModel
    at: float
    seconds: Features
    slowness: Sequence[float]


class Utilisation:
    """Prefill seconds and requests routed per endpoint-second, over the last `window_s`. Before that is known half of
    the time is estimated to be prefill, and requests to have come as they began to."""

    __slots__ = (
        "_arrived",
        "_arrived_before",
        "_ceiling",
        "_started_at",
        "_window_s",
        "_work",
        "_work_before",
    )

    def __init__(self, *, window_s: float = 20.0, ceiling: float = 0.9) -> None:
        self._window_s = window_s
        self._ceiling = ceiling
        self._started_at: float | None = None  # start of the current window; the first begins with the first request
        self._work = self._work_before = 0.0  # endpoint-shares, in this window and in the previous one
        self._arrived = self._arrived_before = 0.0  # the same for requests

    def add(self, work_s: float, endpoints: int, now: float, *, requests: int = 1) -> None:
        """Add `work_s` seconds of prefill, of `requests` requests, routed to one of `endpoints`."""
        if self._started_at is None or now - self._started_at >= self._window_s:
            self._started_at, self._work, self._work_before, self._arrived, self._arrived_before = self._at(now)
        self._work += work_s / endpoints
        self._arrived += requests / endpoints

    def estimate_rates(self, now: float) -> tuple[float, float]:
        """rho, the share of the pool's time that is prefill, at most the ceiling; and requests a second for each
        endpoint. Both over the window under way and the rest of the one before it."""
        started_at = self._started_at
        window_s = self._window_s
        if started_at is None or now - started_at >= window_s:
            started_at, work, work_before, arrived, arrived_before = self._at(now)
        else:
            work = self._work
            work_before = self._work_before
            arrived = self._arrived
            arrived_before = self._arrived_before
        rest = 1.0 - (now - started_at) / window_s
        if not arrived_before:  # as if none were to come, work would be piled on every endpoint at once at a start
            arrived_before = arrived * window_s / (now - started_at + _BEGINNING_S)
        rho = (work_before * rest + work) / window_s
        return rho if rho < self._ceiling else self._ceiling, (arrived_before * rest + arrived) / window_s

    def _at(self, now: float) -> tuple[float, float, float, float, float]:
        """Return a window later than the one under way: its start, work and work before, requests and
        requests before."""
        if self._started_at is None:
            return now, 0.0, _UNKNOWN_RHO * self._window_s, 0.0, 0.0
        elapsed = now - self._started_at
        started_at = self._started_at + self._window_s * (elapsed // self._window_s)
        if elapsed < 2 * self._window_s:
            return started_at, 0.0, self._work, 0.0, self._arrived
        return started_at, 0.0, 0.0, 0.0, 0.0


class EndpointArrivals(msgspec.Struct):
    """One endpoint's recent past."""

    bound_per_s: float  # requests per second that would have cost much more elsewhere
    usual_wait_s: float  # usual wait until a prefill begins
    at: float  # time of the update of both


_AT = attrgetter("at")
#: Estimates this recent need no refresh.
REFRESH_S = 0.02


class ArrivalStats:
    """Arrivals decay over `memory_s`, waits over twice as long. One entry for each endpoint of the pool; `forget` those
    that leave it."""

    def __init__(self, *, memory_s: float = 20.0) -> None:
        self._memory_s = memory_s
        self._by_endpoint: dict[EndpointId, EndpointArrivals] = {}
        # The latest update: if no entry of it needs a refresh, the next estimate for these endpoints is the same.
        self._listed: Sequence[EndpointId] = ()
        self._entries: Sequence[EndpointArrivals] = ()
        self._oldest_at = -math.inf

    def estimate(
        self, endpoints: Sequence[EndpointId], waits_s: Sequence[float], now: float
    ) -> Sequence[EndpointArrivals]:
        """Return the past of each up to about `now`, where a prefill would wait this long. To be read only, and given
        to `update` if a placement follows."""
        if endpoints is self._listed and now - self._oldest_at < REFRESH_S:
            return self._entries
        known = self._by_endpoint
        memory_s = self._memory_s
        found = []
        at = now
        keep = 1.0
        for endpoint, wait_s in zip(endpoints, waits_s, strict=True):
            past = known.get(endpoint)
            if past is None:
                past = EndpointArrivals(0.0, wait_s, now)
            elif now - past.at >= REFRESH_S:
                if past.at != at:  # most have the same time
                    at = past.at
                    keep = math.exp(0.5 * (at - now) / memory_s)
                usual_wait_s = wait_s + (past.usual_wait_s - wait_s) * keep
                past = EndpointArrivals(past.bound_per_s * (keep * keep), usual_wait_s, now)
            found.append(past)
        return found

    def update(self, endpoints: Sequence[EndpointId], estimated: Sequence[EndpointArrivals]) -> None:
        """Replace the estimates of these endpoints. Neither sequence may change afterwards."""
        if estimated is self._entries:
            return
        self._by_endpoint.update(zip(endpoints, estimated, strict=True))
        self._listed = endpoints
        self._entries = estimated
        self._oldest_at = min(map(_AT, estimated))

    def record_arrival(self, endpoint: EndpointId, *, requests: int = 1) -> None:
        """Count requests placed at the endpoint that would have cost much more elsewhere; does nothing before an
        `update`."""
        past = self._by_endpoint.get(endpoint)
        if past is not None:
            past.bound_per_s += requests / self._memory_s

    def forget(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left the pool."""
        self._by_endpoint.pop(endpoint, None)
        self._listed = self._entries = ()

    def known(self) -> Mapping[EndpointId, EndpointArrivals]:
        """Return what stands at present, by endpoint."""
        return dict(self._by_endpoint)
