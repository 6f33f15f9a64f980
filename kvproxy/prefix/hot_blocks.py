"""Which prefixes are asked for so often that replicating them is an investment, not a waste."""

from __future__ import annotations

from array import array
from collections import deque
from math import exp

from kvproxy.prefix.approximate.radix import Node, RadixTree

#: Touches decay by e over this many requests per endpoint.
WINDOW_REQUESTS_PER_ENDPOINT = 64
#: Decayed touches per endpoint that make a block hot.
HOT_TOUCHES_PER_ENDPOINT = 2
_STEPS = 64  # runs looked at per touch when room is needed


class Heat(Node):
    """A run of blocks that were always touched together."""

    __slots__ = ("heat", "last")

    def __init__(self, hashes: array[int]) -> None:
        super().__init__(hashes)
        self.heat = 0.0
        self.last = 0  # number of the request that touched it last


class HotBlocks:
    """Exponentially decayed touches by block. A request touches all blocks of its prompt once.

    Bounded in blocks and in runs; what was touched once goes before what was touched repeatedly.
    """

    def __init__(self, *, endpoints: int = 1, max_blocks: int = 1_000_000, max_runs: int = 32_768) -> None:
        self.endpoints = endpoints  # may be set at any time
        self._max_blocks = max_blocks
        self._max_runs = max_runs
        self._tree: RadixTree[Heat] = RadixTree(Heat)
        self._hand: deque[Heat] = deque()  # every run once, in the order it will be looked at for eviction
        self._requests = 0

    @property
    def blocks(self) -> int:
        """Blocks kept."""
        return self._tree.blocks

    @property
    def runs(self) -> int:
        """Runs kept."""
        return len(self._tree)

    @property
    def threshold(self) -> int:
        """Decayed touches that make a block hot at present."""
        return HOT_TOUCHES_PER_ENDPOINT * max(1, self.endpoints)

    def touch(self, hashes: array[int]) -> int:
        """One request asked for this prompt (`array('Q')`, chained); its leading blocks that were hot before."""
        path, depth, partial, inside = self._tree.walk(hashes)
        hot = self._hot(path, partial, inside)
        self._requests += 1
        if partial is not None and len(self._tree) < self._max_runs:
            head = self._tree.split(partial, inside)
            head.heat, head.last = partial.heat, partial.last
            self._hand.append(head)
            path.append(head)
            depth += inside
            partial = None
        window = WINDOW_REQUESTS_PER_ENDPOINT * max(1, self.endpoints)
        for run in path:
            run.heat = run.heat * exp((run.last - self._requests) / window) + 1.0
            run.last = self._requests
        if partial is None and depth < len(hashes):  # without room to split, what branches off is not kept either
            self._grow(path[-1] if path else None, hashes[depth:])
        return hot

    def kept(self) -> list[Heat]:
        """Every run kept, in no order that means anything."""
        return list(self._hand)

    def touches(self, run: Heat) -> float:
        """The run's decayed touches at present; 0 for one that is kept no more."""
        return self._now(run) if self._tree.has(run) else 0.0

    def prefix(self, run: Heat) -> array[int]:
        """All hashes of the prefix that ends with this run."""
        return self._tree.prefix(run)

    def hot_prefix_blocks(self, hashes: array[int]) -> int:
        """Leading blocks that are hot."""
        path, _, partial, inside = self._tree.walk(hashes)
        return self._hot(path, partial, inside)

    def _hot(self, path: list[Heat], partial: Heat | None, inside: int) -> int:
        threshold = self.threshold
        hot = 0
        for run in path:
            if run.heat < threshold or self._now(run) < threshold:  # heat only decays: no need to work out by how much
                return hot
            hot += len(run.hashes)
        return hot + inside if partial is not None and self._now(partial) >= threshold else hot

    def _now(self, run: Heat) -> float:
        """The run's decayed touches."""
        window = WINDOW_REQUESTS_PER_ENDPOINT * max(1, self.endpoints)
        return float(run.heat * exp((run.last - self._requests) / window))

    def _grow(self, parent: Heat | None, hashes: array[int]) -> None:
        """Keep new blocks if room can be made in a bounded number of steps."""
        run = self._tree.grow(parent, hashes)
        run.heat, run.last = 1.0, self._requests
        steps = _STEPS
        while self._full() and self._hand and steps:
            steps -= 1
            oldest = self._hand.popleft()
            if oldest.child is None and self._now(oldest) < 1.0:
                self._tree.remove(oldest)
            else:
                self._hand.append(oldest)
        if self._full():
            self._tree.remove(run)
        else:
            self._hand.append(run)

    def _full(self) -> bool:
        return self._tree.blocks > self._max_blocks or len(self._tree) > self._max_runs
