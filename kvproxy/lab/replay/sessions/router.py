"""A router whose requests wait for the place of their session, and the interface of rules that give places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvproxy.cluster.routing.policy import Policy
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.view import CacheView


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
