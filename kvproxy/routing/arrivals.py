"""Requests that keep coming to the same endpoint: what the recent past of each endpoint says of its near future."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kvproxy.types import EndpointId


class EndpointArrivals(msgspec.Struct):
    """One endpoint's recent past."""

    bound_per_s: float  # requests a second that would have cost much more elsewhere
    usual_wait_s: float  # for a prefill to begin
    at: float  # when both were brought up to date


#: What was brought up to date so shortly ago is good enough.
REFRESH_S = 0.02


class ArrivalStats:
    """Arrivals decay over `memory_s`, waits over twice as long. One entry for each endpoint of the pool; `forget` those
    that leave it."""

    def __init__(self, *, memory_s: float = 20.0) -> None:
        self._memory_s = memory_s
        self._by_endpoint: dict[EndpointId, EndpointArrivals] = {}
        self._oldest_at = -math.inf  # of all entries

    def estimate(
        self, endpoints: Sequence[EndpointId], waits_s: Sequence[float], now: float
    ) -> tuple[list[EndpointArrivals], dict[EndpointId, EndpointArrivals]]:
        """The past of each up to about `now`, when a prefill would wait so long there; and those of them that were not
        up to date, for `update`. To be read only."""
        known, memory_s = self._by_endpoint, self._memory_s
        if now - self._oldest_at < REFRESH_S:
            present = [known.get(endpoint) for endpoint in endpoints]
            if None not in present:
                return present, {}  # type: ignore[return-value]
        found, renewed = [], {}
        at, keep = now, 1.0
        for endpoint, wait_s in zip(endpoints, waits_s, strict=True):
            past = known.get(endpoint)
            if past is None:
                past = renewed[endpoint] = EndpointArrivals(0.0, wait_s, now)
            elif now - past.at >= REFRESH_S:
                if past.at != at:  # most are of one moment
                    at = past.at
                    keep = math.exp(0.5 * (at - now) / memory_s)
                usual_wait_s = wait_s + (past.usual_wait_s - wait_s) * keep
                past = renewed[endpoint] = EndpointArrivals(past.bound_per_s * (keep * keep), usual_wait_s, now)
            found.append(past)
        return found, renewed

    def update(self, renewed: Mapping[EndpointId, EndpointArrivals]) -> None:
        """What `estimate` brought up to date stands from now on."""
        if renewed:
            self._by_endpoint.update(renewed)
            self._oldest_at = min([past.at for past in self._by_endpoint.values()])

    def record_arrival(self, endpoint: EndpointId) -> None:
        """A request goes there, now, that would have cost much more elsewhere; nothing to count before an `update`."""
        past = self._by_endpoint.get(endpoint)
        if past is not None:
            past.bound_per_s += 1.0 / self._memory_s

    def forget(self, endpoint: EndpointId) -> None:
        """The endpoint left the pool."""
        self._by_endpoint.pop(endpoint, None)

    def known(self) -> Mapping[EndpointId, EndpointArrivals]:
        """What stands at present, by endpoint."""
        return dict(self._by_endpoint)
