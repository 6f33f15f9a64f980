"""Choosing the least of several costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from kvproxy.routing.policy import Candidate

#: Reasons of the policies whose choice is `least(costs)`.
LOWEST_COST: Mapping[str, str] = {"lowest_cost": "its cost is the least"}


def least(costs: Sequence[float], rng: Random) -> int:
    """Index of the least cost; ties fall to the rng, so that they do not herd onto the first endpoint."""
    lowest = min(costs)
    first = costs.index(lowest)
    if costs.count(lowest) == 1:
        return first
    return rng.choice([index for index, cost in enumerate(costs) if cost == lowest])


def least_loaded(candidates: Sequence[Candidate], rng: Random) -> int:
    """Index of the candidate with the least (in flight + 1) / weight; one of them at random when several have it."""
    shares = [(candidate.load.in_flight + 1) / candidate.weight for candidate in candidates]
    least = min(shares)
    ties = shares.count(least)
    index = shares.index(least)
    if ties > 1:
        for _ in range(int(rng.random() * ties)):
            index = shares.index(least, index + 1)
    return index
