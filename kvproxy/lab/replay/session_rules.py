"""Rules that give places to sessions: their interface, the router that follows one, and the bound where memory is
short."""

from __future__ import annotations

import pkgutil
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvproxy.cluster.routing.policy import Policy
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.view import CacheView
from kvproxy.lab.simulator.timing import EngineTiming


class Grant(NamedTuple):
    """A request that may go, and where to."""

    request: LiveRequest
    endpoint: SimEndpoint


class SessionRule(Protocol):
    """Gives places to sessions. `endpoints` are those present, a live list; sessions are those of the trace, and their
    ends are known, as clients of such schedulers report them."""

    def begin(self, endpoints: Sequence[SimEndpoint]) -> None:
        """Begin a run."""

    def offer(self, request: LiveRequest, now: float) -> None:
        """Add a request that came."""

    def take(self, now: float) -> Grant | None:
        """Return a request to place now; call until None."""

    def next_at(self, now: float) -> float | None:
        """Return when `take` may have something although nothing ended; None: not before."""

    def ended(self, request: LiveRequest, endpoint: SimEndpoint, now: float, *, last: bool) -> None:
        """Handle an end, in whatever way, of a request that was placed; the `last` of its session."""

    def left(self, endpoint: SimEndpoint) -> None:
        """Handle the loss of an endpoint with all that was placed there; it is not among the endpoints any more."""


class PlacesRouter(VirtualRouter):
    """Places requests when and where its rule grants it. It looks for no prefixes: where a session has its place, its
    prefix is."""

    def __init__(
        self,
        endpoints: Sequence[SimEndpoint],
        policy: Policy,
        view: CacheView,
        *,
        rule: SessionRule,
        turns: Sequence[int],
    ) -> None:
        super().__init__(endpoints, policy, CacheView())
        self._rule = rule
        self._turns = turns  # of each session
        rule.begin(self.endpoints)

    def arrive(self, request: LiveRequest, now: float) -> Placement | None:
        """Return the placement of a request that may go, which may be another one."""
        self._rule.offer(request, now)
        return self.release(now)

    def release(self, now: float) -> Placement | None:
        """Place the next request whose session has a place; call until None."""
        grant = self._rule.take(now)
        if grant is None:
            return None
        return self._place(grant.request, self._decide(grant.request, now, preferred=grant.endpoint.id), now)

    def next_release_at(self, now: float) -> float | None:
        """When the rule looks again."""
        return self._rule.next_at(now)

    def finished(self, placement: Placement, now: float) -> None:
        """Handle the end of the response."""
        super().finished(placement, now)
        self._end(placement, now)

    def leave(self, endpoint: SimEndpoint, lost: Iterable[Placement], now: float) -> None:
        """Remove an endpoint and the requests placed there."""
        lost = list(lost)
        super().leave(endpoint, lost, now)
        for placement in lost:
            self._end(placement, now)
        self._rule.left(endpoint)

    def _end(self, placement: Placement, now: float) -> None:
        request = placement.request
        last = request.number + 1 == self._turns[request.session]
        self._rule.ended(request, placement.endpoint, now, last=last)


#: Makes a rule for engines of this speed.
MakeRule = Callable[[EngineTiming], SessionRule]

#: The bound with the best number of sessions, which is found by trying.
BEST_PLACES = "places"
_PLACES = re.compile(r"places=([1-9]\d{0,5})")


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


def find_best_places(measure: Callable[[int], float], most: int) -> int:
    """Return the number of sessions an endpoint, at most `most`, of which `measure` gives the highest figure, where it
    rises up to some number and falls from there; in about two tries for each doubling."""
    known: dict[int, float] = {}

    def value(places: int) -> float:
        if places not in known:
            known[places] = measure(places)
        return known[places]

    best = 1
    while best < most and value(min(most, 2 * best)) > value(best):
        best = min(most, 2 * best)
    step = best // 2
    while step:
        best = max((each for each in (best - step, best, best + step) if 1 <= each <= most), key=value)
        step //= 2
    return best


def find_rule(name: str) -> MakeRule | None:
    """Return the rule of this name, if it is the name of one: `places=N` is the bound with N sessions an endpoint,
    `module:Rule` a class to import, made with the engines' timing."""
    if match := _PLACES.fullmatch(name):
        limit = int(match[1])
        return lambda timing: Places(limit)
    if ":" not in name:
        return None
    try:
        rule: MakeRule = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--policy {name} cannot be imported: {error}") from error
    return rule
