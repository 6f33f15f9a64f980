"""One cache that several engines share, as no real fleet has: what a bound on routing is measured with."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.simulator.block_cache import BlockCache


class PooledCache(BlockCache):
    """Engines plan their steps one by one, each against all the free blocks, so that two plans may want the same one.
    The pool then lends blocks beyond its capacity and takes them back as soon as any is free."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks, record_events=False)
        self._lent = 0

    def allocate(self, count: int) -> list[int]:
        for _ in range(count - len(self._free)):
            self._free[len(self._users)] = None
            self._users.append(0)
            self._hash_of.append(None)
            self._lent += 1
        return super().allocate(count)

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        while self._lent and self._free:
            super().allocate(1)  # never released again
            self._lent -= 1
