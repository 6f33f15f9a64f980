"""Blocks by age: an endpoint's by the last request for each, and reused prefixes by their age at reuse. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeVar

from kvproxy.cache.indexes.radix import Node

#: A capacity's share that a generation is full at, and so the resolution.
GENERATIONS = 16
#: Generations before neighbours are merged; the sum over them is the cost of an answer.
_MOST_GENERATIONS = 3 * GENERATIONS

#: Bins of an octave.
PER_OCTAVE = 8
_BINS = 40 * PER_OCTAVE
#: Each outcome weighs so much more than the one before: about the last 300 count.
_GROWTH = 1.003
_WEIGHT_BOUND = 1e9


N = TypeVar("N", bound=Node)


class AgeHistogram:
    """Blocks by the number of their latest touch, in generations of consecutive touches.

    An LRU cache of N blocks holds what fewer than N blocks are younger than. Exact to within one generation.
    """

    __slots__ = ("_blocks", "_first")

    def __init__(self) -> None:
        self._first = [0]  # touch each generation begins with, rising
        self._blocks = [0]  # with their latest touch in it

    def touch_runs(self, runs: Sequence[N], stamps: dict[N, int], touch: int, span: int) -> None:
        """All blocks of these runs are touched now, as number `touch`; `stamps` has each run's latest touch. A
        generation of `span` blocks is full."""
        first = self._first
        blocks = self._blocks
        if blocks[-1] >= span:
            self._begin(touch, span)
            first = self._first
            blocks = self._blocks
        newest = first[-1]
        for run in runs:
            before = stamps.get(run, -1)
            if before < newest:
                count = len(run.hashes)
                blocks[-1] += count
                if before >= 0:
                    blocks[bisect_right(first, before) - 1] -= count
            stamps[run] = touch

    def change_count(self, touch: int, blocks: int) -> None:
        """So many more (or fewer) blocks have this as their latest touch."""
        self._blocks[bisect_right(self._first, touch) - 1] += blocks

    def count_younger(self, touch: int) -> int:
        """Blocks touched since, half of the touch's own generation among them."""
        blocks = self._blocks
        if touch >= self._first[-1]:
            return blocks[-1] // 2
        at = bisect_right(self._first, touch)
        return sum(blocks[at:]) + blocks[at - 1] // 2

    def renumber_touches(self, kept: Sequence[int]) -> None:
        """Give touches new numbers: `kept[n]` becomes n, the others had no block left."""
        self._first = [bisect_left(kept, touch) for touch in self._first]

    def _begin(self, touch: int, span: int) -> None:
        if len(self._first) >= _MOST_GENERATIONS:
            self._join(span)
        self._first.append(touch)
        self._blocks.append(0)

    def _join(self, span: int) -> None:
        """Neighbours that are one generation's blocks together become one."""
        first = [self._first[0]]
        blocks = [self._blocks[0]]
        for touch, count in zip(self._first[1:], self._blocks[1:], strict=True):
            if blocks[-1] + count <= span:
                blocks[-1] += count
            else:
                first.append(touch)
                blocks.append(count)
        self._first = first
        self._blocks = blocks


class ReuseHistogram:
    """Reused prefixes by their age: still there (a hit), or evicted. The latest counts 1 and older ones fade.

    Ages are in bins of an eighth of an octave of blocks; a capacity that begins with bin n keeps what is in lower ones.
    """

    def __init__(self) -> None:
        self._hit = [0.0] * _BINS
        self._evicted = [0.0] * _BINS
        self._weight = 1.0  # of the latest; older ones stay as they are

    def add_hit(self, at: int) -> None:
        """Count a prefix of this age that was still there."""
        self._age()
        self._hit[at] += self._weight

    def add_evicted(self, at: int) -> None:
        """Count a prefix of this age that was evicted."""
        self._age()
        self._evicted[at] += self._weight

    def discount_evicted(self, at: int) -> None:
        """One of the latest that were evicted was lost for another reason."""
        self._evicted[at] = max(0.0, self._evicted[at] - self._weight)

    def count_between(self, start: int, stop: int) -> float:
        """Prefixes of these ages, from `start` to before `stop`."""
        return sum(self._hit[start:stop] + self._evicted[start:stop]) / self._weight

    def evicted_from(self, at: int) -> float:
        """Prefixes of this age or older that were evicted."""
        return sum(self._evicted[at:]) / self._weight

    def find_best(self, low: int, high: int, *, near: int) -> tuple[int, float]:
        """Return the capacity from `low` to `high` that contradicts the fewest of them, of several the one nearest to
        `near`; and how many fewer than `near` does."""
        wrong = sum(self._hit[low:])
        best = near
        least = math.inf
        there = 0.0
        for at in range(low, high + 1):
            if at == near:
                there = wrong
            if (wrong, abs(at - near)) < (least, abs(best - near)):
                best = at
                least = wrong
            wrong += self._evicted[at] - self._hit[at]
        return best, (there - least) / self._weight

    def _age(self) -> None:
        self._weight *= _GROWTH
        if self._weight > _WEIGHT_BOUND:
            for bins in (self._hit, self._evicted):
                bins[:] = [each / self._weight for each in bins]
            self._weight = 1.0


def age_bin(blocks: int) -> int:
    """Return the bin an age falls into."""
    return int(PER_OCTAVE * math.log2(blocks)) if blocks > 1 else 0


def capacity_bin(blocks: int) -> int:
    """Return the bin that a capacity begins with, or nearly so."""
    return round(PER_OCTAVE * math.log2(blocks)) if blocks > 1 else 0


def capacity_of(at: int) -> int:
    """Blocks of a capacity that begins with this bin."""
    return round(math.exp2(at / PER_OCTAVE))
