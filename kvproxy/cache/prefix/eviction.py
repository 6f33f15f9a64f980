"""Eviction score shared by strategies and simulated caches."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Priority(IntEnum):
    """Prefixes kept regardless of their score, the last longest."""

    NORMAL = 0
    CONTRACT = 1  # promised to a client: evicted only if nothing else is left
    OPERATOR = 2  # named by the operator: never goes


class Weights(NamedTuple):
    """How much each term counts; only their ratios matter."""

    frequency: float = 0.5
    size: float = 0.3
    recency: float = 0.2
    next_use: float = 0.5


class Use(NamedTuple):
    """How an entry was used. Times are in one unit, whichever; sizes too."""

    uses: float  # recent uses, however old
    size: float  # of the whole prefix that ends with it
    idle: float  # since its last use
    gap: float  # usual time from one use to the next


def score_use(use: Use, weights: Weights, *, span: float, size: float) -> float:
    """Return a score from 0 (keep) to 1 (evict first). `span` is a time and `size` a size at which a term stands at a
    half.

    Of equal uses the longer prefix goes first: a prompt's beginning is of use without its end, but not the reverse. A
    prefix overdue for its next use is expected even later."""
    expected = max(use.gap, use.idle)
    return (
        weights.frequency / (1.0 + use.uses)
        + weights.size * (1.0 - size / (use.size + size))
        + weights.recency * (1.0 - span / (use.idle + span))
        + weights.next_use * (1.0 - span / (expected + span))
    ) / sum(weights)
