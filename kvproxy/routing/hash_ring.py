"""A consistent-hash ring: a key's owner changes only when that owner comes, goes or is reweighted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from kvproxy.routing.policy import Candidate
from kvproxy.types import EndpointId

#: Points of the heaviest member, between half of this and this; more points make the shares more even.
_POINTS = 160

#: Members that left are kept (and passed over) until the ring holds this many more than the present ones.
_PRUNE_AFTER = 32


class HashRing:
    """Members stand on the ring with points in proportion to their weights; a key belongs to the next point."""

    def __init__(self) -> None:
        self._weights: dict[EndpointId, float] = {}
        self._hashes: dict[EndpointId, list[int]] = {}
        self._owners: dict[int, EndpointId] = {}
        self._points: list[int] = []

    def follow(self, candidates: Sequence[Candidate]) -> dict[EndpointId, int]:
        """Index of every candidate by id, all of them now on the ring.

        Who is no candidate at the moment stays on it and is passed over by the caller, which has the same effect as
        leaving and spares a rebuild for each request that excludes somebody.
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
        points, owners = self._points, self._owners
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
