"""Consistent hashing with bounded load."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.cluster.routing.simple import Choices

#: No endpoint takes more than this times its fair share of the requests in flight.
LOAD_FACTOR = 1.25


class ConsistentHash(Policy):
    """Hashes the session key, or else the prompt's head; a request with neither goes anywhere on the ring.

    An endpoint at its bound is passed over for the next one on the ring (Mirrokni, Thorup and Zadimoghaddam 2016).
    """

    reasons = {
        "hash_owner": "its hash belongs there",
        "hash_overflow": "its hash's owner is full",
        "hash_no_key": "the prompt is empty",
    }

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._ring = HashRing()
        self._owner = Choices("hash_owner")
        self._next = Choices("hash_overflow")
        self._keyless = Choices("hash_no_key")

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """O(endpoints), most of it adding up the load."""
        indexes = self._ring.place_candidates(candidates)
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
        # One has capacity, because the bounds add up to more than the load.
        return (self._next if key else self._keyless)[next(index for index in ranked if has_room(index))]


def key_of(request: PickRequest) -> bytes:
    """Return what a request is hashed by; b"" when there is nothing."""
    return request.session_key.encode("utf-8", "surrogatepass") if request.session_key else request.prompt_head


def totals(candidates: Sequence[Candidate]) -> tuple[int, float]:
    """Return requests in flight and weight of all candidates."""
    in_flight = 0
    weight = 0.0
    for candidate in candidates:
        in_flight += candidate.load.in_flight
        weight += candidate.weight
    return in_flight, weight


#: Points of the heaviest member, between half of this and this; more points make the shares more even.
_POINTS = 160

#: Members that left are kept (and skipped) until the ring holds this many more than the present ones.
_PRUNE_AFTER = 32


class HashRing:
    """Members stand on the ring with points in proportion to their weights; a key belongs to the next point."""

    def __init__(self) -> None:
        self._weights: dict[EndpointId, float] = {}
        self._hashes: dict[EndpointId, list[int]] = {}
        self._owners: dict[int, EndpointId] = {}
        self._points: list[int] = []

    def place_candidates(self, candidates: Sequence[Candidate]) -> dict[EndpointId, int]:
        """Index of every candidate by id, all of them now on the ring.

        A member that is no candidate at the moment stays on it and is passed over by the caller, which has the same
        effect as leaving and spares a rebuild for each request that excludes an endpoint.
        """
        weights = self._weights
        changed = False
        indexes: dict[EndpointId, int] = {}
        for index, candidate in enumerate(candidates):
            indexes[candidate.id] = index
            if weights.get(candidate.id) != candidate.weight:
                weights[candidate.id] = candidate.weight
                changed = True
        if len(weights) > len(candidates) + _PRUNE_AFTER:
            self._weights = {candidate.id: candidate.weight for candidate in candidates}
            changed = True
        if changed:
            self._build(self._weights)
        return indexes

    def walk(self, key: bytes) -> Iterator[EndpointId]:
        """Every member once, in the order in which this key prefers them."""
        points = self._points
        owners = self._owners
        start = bisect_left(points, xxhash.xxh3_64_intdigest(key))
        seen: set[EndpointId] = set()
        for offset in range(start - len(points), start):  # negative indexes wrap around
            owner = owners[points[offset]]
            if owner not in seen:
                seen.add(owner)
                yield owner

    def _build(self, weights: Mapping[EndpointId, float]) -> None:
        # The unit is a power of two, so that one member's new weight seldom moves another member's points.
        unit = 2.0 ** math.ceil(math.log2(max(weights.values())))
        self._hashes = {member: self._hashes.get(member, []) for member in weights}
        self._owners = {}
        for member in sorted(weights):
            count = max(1, round(_POINTS * weights[member] / unit))
            for point in self._points_of(member, count):
                self._owners.setdefault(point, member)
        self._points = sorted(self._owners)

    def _points_of(self, member: EndpointId, count: int) -> list[int]:
        hashes = self._hashes[member]
        name = member.encode()
        hashes.extend(xxhash.xxh3_64_intdigest(name, seed=seed) for seed in range(len(hashes), count))
        return hashes[:count]
