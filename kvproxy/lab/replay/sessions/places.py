"""The bound where memory is short: so many sessions on each endpoint, each admitted once and to its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvproxy.lab.replay.router import LiveRequest, SimEndpoint
from kvproxy.lab.replay.sessions.router import Grant


class Places:
    """At most `limit` sessions on an endpoint; those that wait go in the order they came, to the endpoint with the most
    free places. A session keeps its place until it ends, so that nothing of it is computed twice unless `limit` is too
    high: the best limit is a bound that needs to be found by trying, and knows the sessions' ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._endpoints: Sequence[SimEndpoint] = ()
        self._home: dict[int, SimEndpoint] = {}  # by session
        self._taken: dict[int, int] = {}  # by endpoint
        self._waiting: deque[LiveRequest] = deque()
        self._ready: deque[Grant] = deque()

    def begin(self, endpoints: Sequence[SimEndpoint]) -> None:
        self._endpoints = endpoints

    def offer(self, request: LiveRequest, now: float) -> None:
        home = self._home.get(request.session)
        if home is None:
            self._waiting.append(request)
        else:
            self._ready.append(Grant(request, home))

    def take(self, now: float) -> Grant | None:
        if not self._ready and self._waiting and self._endpoints:
            best = min(self._endpoints, key=lambda one: self._taken.get(one.index, 0))
            if self._taken.get(best.index, 0) < self._limit:
                request = self._waiting.popleft()
                self._home[request.session] = best
                self._taken[best.index] = self._taken.get(best.index, 0) + 1
                self._ready.append(Grant(request, best))
        return self._ready.popleft() if self._ready else None

    def next_at(self, now: float) -> float | None:
        return now if self._ready else None

    def ended(self, request: LiveRequest, endpoint: SimEndpoint, now: float, *, last: bool) -> None:
        if last and self._home.pop(request.session, None) is not None:
            self._taken[endpoint.index] -= 1

    def left(self, endpoint: SimEndpoint) -> None:
        self._taken.pop(endpoint.index, None)
        self._home = {session: home for session, home in self._home.items() if home is not endpoint}
        self._waiting.extendleft(one.request for one in self._ready if one.endpoint is endpoint)
        self._ready = deque(one for one in self._ready if one.endpoint is not endpoint)
