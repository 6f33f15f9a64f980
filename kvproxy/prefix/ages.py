"""How much an endpoint was asked for since something was: its blocks counted by when each was asked for last. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

#: Generations there may be before neighbours are put together; the sum over them is what an answer costs.
_MOST_GENERATIONS = 96
#: A generation's share of the capacity, and so the resolution.
GENERATIONS = 32


class Ages:
    """Blocks by the number of their latest touch, in generations of consecutive touches.

    An LRU cache of N blocks holds what fewer than N blocks are younger than. Exact to within one generation.
    """

    __slots__ = ("_blocks", "_first")

    def __init__(self) -> None:
        self._first = [0]  # touch each generation begins with, rising
        self._blocks = [0]  # whose latest touch falls into it

    @property
    def newest(self) -> int:
        """First touch of the generation that is being filled."""
        return self._first[-1]

    def begin(self, touch: int, span: int) -> None:
        """Touch number `touch` follows; a generation of `span` blocks is full."""
        if self._blocks[-1] >= span:
            if len(self._first) >= _MOST_GENERATIONS:
                self._join(span)
            self._first.append(touch)
            self._blocks.append(0)

    def renew(self, touch: int, blocks: int) -> None:
        """These blocks, touched before the newest generation, are touched now."""
        self._blocks[bisect_right(self._first, touch) - 1] -= blocks
        self._blocks[-1] += blocks

    def enter(self, blocks: int) -> None:
        """So many more blocks are touched now."""
        self._blocks[-1] += blocks

    def change(self, touch: int, blocks: int) -> None:
        """So many more (or fewer) blocks have this as their latest touch."""
        self._blocks[bisect_right(self._first, touch) - 1] += blocks

    def younger(self, touch: int) -> int:
        """Blocks touched since, half of the touch's own generation among them."""
        at = bisect_right(self._first, touch) - 1
        return sum(self._blocks[at + 1 :]) + self._blocks[at] // 2

    def renumber(self, kept: Sequence[int]) -> None:
        """Touches are numbered anew: `kept[n]` becomes n, the others had no block left."""
        self._first = [bisect_left(kept, touch) for touch in self._first]

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
