"""Consistent hashing with bounded load: equal keys meet on one endpoint unless that one is too full."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from kvproxy.routing.hash_ring import HashRing
from kvproxy.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.routing.simple import Choices

#: No endpoint takes more than this times its fair share of the requests in flight.
LOAD_FACTOR = 1.25


class ConsistentHash(Policy):
    """Hashes the session key, or else the prompt's head; a request with neither goes anywhere on the ring.

    An endpoint at its bound is passed over for the next one on the ring (Mirrokni, Thorup and Zadimoghaddam 2016).
    """

    reasons = {
        "hash_owner": "its hash belongs there",
        "hash_overflow": "its hash's owner is full",
        "hash_no_key": "there was nothing to hash",
    }

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._ring = HashRing()
        self._owner = Choices("hash_owner")
        self._next = Choices("hash_overflow")
        self._keyless = Choices("hash_no_key")

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """O(endpoints), most of it adding up the load."""
        indexes = self._ring.follow(candidates)
        in_flight, weight = totals(candidates)
        share = LOAD_FACTOR * (in_flight + 1) / weight

        def has_room(index: int) -> bool:
            candidate = candidates[index]
            return candidate.load.in_flight < math.ceil(share * candidate.weight)

        key = key_of(request)
        ranked = (indexes[member] for member in self._ring.walk(key or self._rng.randbytes(8)) if member in indexes)
        owner = next(ranked)
        if has_room(owner):
            return (self._owner if key else self._keyless)[owner]
        # One has room, because the bounds add up to more than the load.
        return (self._next if key else self._keyless)[next(index for index in ranked if has_room(index))]


def key_of(request: PickRequest) -> bytes:
    """What a request is hashed by; b"" when there is nothing."""
    return request.session_key.encode("utf-8", "surrogatepass") if request.session_key else request.prompt_head


def totals(candidates: Sequence[Candidate]) -> tuple[int, float]:
    """Requests in flight and weight of all candidates."""
    in_flight, weight = 0, 0.0
    for candidate in candidates:
        in_flight += candidate.load.in_flight
        weight += candidate.weight
    return in_flight, weight
