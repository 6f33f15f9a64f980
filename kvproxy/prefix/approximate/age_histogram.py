"""An endpoint's blocks counted by when each was asked for last. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeVar

from kvproxy.prefix.approximate.radix import Node

#: A capacity's share that a generation is full at, and so the resolution.
GENERATIONS = 16
#: Generations there may be before neighbours are put together; the sum over them is what an answer costs.
_MOST_GENERATIONS = 3 * GENERATIONS


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
        first, blocks = self._first, self._blocks
        if blocks[-1] >= span:
            self._begin(touch, span)
            first, blocks = self._first, self._blocks
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
        first, blocks = [self._first[0]], [self._blocks[0]]
        for touch, count in zip(self._first[1:], self._blocks[1:], strict=True):
            if blocks[-1] + count <= span:
                blocks[-1] += count
            else:
                first.append(touch)
                blocks.append(count)
        self._first, self._blocks = first, blocks
