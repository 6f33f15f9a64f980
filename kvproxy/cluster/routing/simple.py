"""The policies that are one rule each: chance, turns and fewest requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.costs import least_loaded
from kvproxy.cluster.routing.policy import Candidate, Choice, PickRequest, Policy

#: Endpoints that left are forgotten once the memory of a policy is this many entries beyond the present ones.
_FORGET_AFTER = 64


class Choices:
    """Choices of one reason, made once each: a frozen object costs more than the decision itself."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._made: list[Choice] = []

    def __getitem__(self, index: int) -> Choice:
        while index >= len(self._made):
            self._made.append(Choice(len(self._made), self._reason))
        return self._made[index]


class RandomPolicy(Policy):
    """Draws in proportion to weight."""

    reasons = {"random": "drawn at random"}

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._choices = Choices("random")

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """O(endpoints)."""
        drawn = self._rng.random() * sum([candidate.weight for candidate in candidates])
        for index, candidate in enumerate(candidates):
            drawn -= candidate.weight
            if drawn < 0.0:
                return self._choices[index]
        return self._choices[len(candidates) - 1]  # the last sliver is lost to rounding


class RoundRobin(Policy):
    """Smooth weighted round robin: of weights 2 and 1 the turns are a, b, a rather than a, a, b.

    Each candidate earns its weight each turn; the richest is chosen and pays for all. An endpoint's earnings stay with
    its id, so that endpoints may be screened out for some requests without disturbing the others' turns."""

    reasons = {"round_robin": "it was its turn"}

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._earned: dict[EndpointId, float] = {}
        self._choices = Choices("round_robin")

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """O(endpoints)."""
        earned = self._earned
        best = 0
        richest = float("-inf")
        for index, candidate in enumerate(candidates):
            wealth = earned.get(candidate.id, 0.0) + candidate.weight
            if wealth > richest:
                best = index
                richest = wealth
        return self._choices[best]

    def placed(
        self, request: PickRequest, candidates: Sequence[Candidate], index: int, now: float, *, choice: Choice | None
    ) -> None:
        """Take the chosen endpoint's turn."""
        if choice is None:
            return
        earned = self._earned
        if len(earned) > len(candidates) + _FORGET_AFTER:
            earned = self._earned = {each.id: earned.get(each.id, 0.0) for each in candidates}
        total = 0.0
        for candidate in candidates:
            total += candidate.weight
            earned[candidate.id] = earned.get(candidate.id, 0.0) + candidate.weight
        earned[candidates[index].id] -= total


class LeastRequest(Policy):
    """The least requests in flight for its weight, counting this one; ties are drawn."""

    reasons = {"least_request": "it has the fewest requests in flight"}

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._choices = Choices("least_request")

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """O(endpoints)."""
        return self._choices[least_loaded(candidates, self._rng)]


class PowerOfTwo(Policy):
    """The less loaded, for its weight, of two drawn at random: nearly least_request, at a constant cost."""

    reasons = {"power_of_two": "the less loaded of two drawn at random"}

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._choices = Choices("power_of_two")

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """O(1)."""
        count = len(candidates)
        first = int(self._rng.random() * count)
        if count == 1:
            return self._choices[0]
        second = int(self._rng.random() * (count - 1))
        second += second >= first
        a = candidates[first]
        b = candidates[second]
        first_is_less = (a.load.in_flight + 1) * b.weight <= (b.load.in_flight + 1) * a.weight
        return self._choices[first if first_is_less else second]
