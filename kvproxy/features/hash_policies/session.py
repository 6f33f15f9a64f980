"""Session affinity: requests of a session go to one endpoint while it is not overloaded."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvproxy.cluster.routing.costs import least_loaded
from kvproxy.cluster.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.cluster.routing.simple import Choices
from kvproxy.features.hash_policies.consistent_hash import HashRing, totals

#: A session leaves its endpoint when that one has more than this times its fair share in flight...
SESSION_LOAD_FACTOR = 2.0
#: ...and at least this many: a cached conversation is worth a short queue.
LEAST_OVERLOAD = 8


class Session(Policy):
    """By hash of the session key; without one, or when its endpoint is overloaded, by least requests in flight.

    It holds nothing per session, so it needs no bound and every proxy in front of the same endpoints agrees.
    """

    reasons = {
        "session": "its session lives there",
        "session_overloaded": "its session's endpoint is overloaded",
        "no_session": "the request names no session",
    }

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._ring = HashRing()
        self._sticky = Choices("session")
        self._overloaded = Choices("session_overloaded")
        self._keyless = Choices("no_session")

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """O(endpoints)."""
        if not request.session_key:
            return self._keyless[least_loaded(candidates, self._rng)]
        index = self._home(request.session_key.encode("utf-8", "surrogatepass"), candidates)
        home = candidates[index]
        in_flight, weight = totals(candidates)
        bound = max(LEAST_OVERLOAD, SESSION_LOAD_FACTOR * (in_flight + 1) * home.weight / weight)
        if home.load.in_flight >= bound:
            return self._overloaded[least_loaded(candidates, self._rng)]
        return self._sticky[index]

    def _home(self, key: bytes, candidates: Sequence[Candidate]) -> int:
        indexes = self._ring.place_candidates(candidates)
        return next(indexes[member] for member in self._ring.walk(key) if member in indexes)
