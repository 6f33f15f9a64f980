"""Choosing the least of several costs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvproxy.balancing.policy import Candidate


def least(costs: Sequence[float], rng: Random) -> int:
    """Index of the least cost; ties fall to the rng, so that they do not herd onto the first endpoint."""
    lowest = min(costs)
    first = costs.index(lowest)
    if costs.count(lowest) == 1:
        return first
    return rng.choice([index for index, cost in enumerate(costs) if cost == lowest])


def least_loaded(candidates: Sequence[Candidate], rng: Random) -> int:
    """Index of the candidate with the fewest requests in flight for its weight."""
    return least([candidate.load.in_flight / candidate.weight for candidate in candidates], rng)
