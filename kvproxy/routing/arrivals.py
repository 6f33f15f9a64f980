"""Who keeps coming to which endpoint: what the recent past of each says of its near future."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvproxy.types import EndpointId


@dataclass(slots=True)
class EndpointArrivals:
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

    def seen(self, endpoints: Iterable[EndpointId], waits_s: Iterable[float], now: float) -> list[EndpointArrivals]:
        """The past of each up to about `now`, when a prefill would wait so long there. To be read only."""
        known, memory_s, customs = self._by_endpoint, self._memory_s, []
        at, keep = now, 1.0
        for endpoint, wait_s in zip(endpoints, waits_s, strict=True):
            custom = known.get(endpoint)
            if custom is None:
                custom = known[endpoint] = EndpointArrivals(0.0, wait_s, now)
            elif now - custom.at >= REFRESH_S:
                if custom.at != at:  # most are of one moment
                    at = custom.at
                    keep = math.exp(0.5 * (at - now) / memory_s)
                custom.bound_per_s *= keep * keep
                custom.usual_wait_s = wait_s + (custom.usual_wait_s - wait_s) * keep
                custom.at = now
            customs.append(custom)
        return customs

    def came(self, endpoint: EndpointId) -> None:
        """A request went there, now, that would have cost much more elsewhere; nothing to count before `seen`."""
        custom = self._by_endpoint.get(endpoint)
        if custom is not None:
            custom.bound_per_s += 1.0 / self._memory_s

    def forget(self, endpoint: EndpointId) -> None:
        """The endpoint left the pool."""
        self._by_endpoint.pop(endpoint, None)

    def present(self) -> dict[EndpointId, EndpointArrivals]:
        """What was last seen of each."""
        return dict(self._by_endpoint)
