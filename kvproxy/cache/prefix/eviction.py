"""What goes first where a cache is short of room: one score, for what strategies do and for simulated caches."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Priority(IntEnum):
    """What is kept whatever its score, the last longest."""

    NORMAL = 0
    CONTRACT = 1  # promised to a client: goes only where nothing else is left
    OPERATOR = 2  # named by the operator: never goes


class Weights(NamedTuple):
    """How much each term counts; only their ratios matter."""

    frequency: float = 0.5
    size: float = 0.3
    recency: float = 0.2
    next_use: float = 0.5


class Use(NamedTuple):
    """How an entry was used. Times are in one unit, whichever; sizes too."""

    uses: float  # of late, however far back that is
    size: float  # of the whole prefix that ends with it
    idle: float  # since its last use
    gap: float  # usual time from one use to the next


def score_use(use: Use, weights: Weights, *, span: float, size: float) -> float:
    """From 0, to be kept, to 1, to go first. `span` is a time and `size` a size at which a term stands at a half.

    Of equal uses the longer prefix goes first: a prompt's beginning is of use without its end, and the end is not
    without the beginning. What is due later than usual is expected the later for it.
    """
    expected = max(use.gap, use.idle)
    return (
        weights.frequency / (1.0 + use.uses)
        + weights.size * (1.0 - size / (use.size + size))
        + weights.recency * (1.0 - span / (use.idle + span))
        + weights.next_use * (1.0 - span / (expected + span))
    ) / sum(weights)
