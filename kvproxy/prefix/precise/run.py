"""A run of consecutive blocks under two names each: the engine's, by which events speak, and our chained hash.

Columns of machine integers rather than an object a block.
"""

from __future__ import annotations

from array import array

import msgspec

#: Bits of a block's tiers; bit 0 is the engine's own memory.
MAX_TIERS = 8
#: Tails that left are given back to the allocator in steps of so many blocks.
TRIM = 64


class Run(msgspec.Struct, gc=False, eq=False):
    """Blocks each below the one before. Places before `start` are dead. In no cycle, so no collector looks at it."""

    number: int
    keys: array[int]  # the engine's names
    blocks: array[int]  # our hashes
    tiers: int  # bit per tier all blocks are on, unless `mixed` says it for each
    mixed: bytearray | None = None
    start: int = 0

    def on(self, at: int) -> int:
        """Tiers of one block, as bits."""
        return self.tiers if self.mixed is None else self.mixed[at]

    def put(self, at: int, end: int, tiers: int) -> None:
        """Blocks at..end are on these tiers and no other."""
        if at == self.start and end == len(self.keys):
            self.tiers, self.mixed = tiers, None
            return
        if self.mixed is None:
            if tiers == self.tiers:
                return
            self.mixed = bytearray((self.tiers,)) * len(self.keys)
        self.mixed[at:end] = bytes((tiers,)) * (end - at)
        self._settle(tiers)

    def add(self, at: int, end: int, tier_bit: int) -> None:
        """Blocks at..end are on this tier as well."""
        if self.mixed is None:
            self.put(at, end, self.tiers | tier_bit)
            return
        for place in range(at, end):
            tiers = self.mixed[place] | tier_bit
            self.mixed[place] = tiers
        self._settle(tiers)

    def extend(self, keys: array[int], blocks: array[int], tier_bit: int) -> None:
        """New blocks at the end, on one tier."""
        if self.mixed is None and self.tiers != tier_bit:
            self.mixed = bytearray((self.tiers,)) * len(self.keys)
        if self.mixed is not None:
            self.mixed += bytes((tier_bit,)) * len(keys)
        self.keys += keys
        self.blocks += blocks

    def _settle(self, tiers: int) -> None:
        """Say it once if all blocks are on these tiers by now."""
        mixed, start = self.mixed, self.start
        if mixed is None or mixed[start] != tiers or mixed[-1] != tiers:
            return
        if mixed.count(tiers, start) == len(mixed) - start:
            self.tiers, self.mixed = tiers, None

    def cut(self, end: int) -> None:
        """Forget the places from `end` on."""
        del self.keys[end:], self.blocks[end:]
        if self.mixed is not None:
            del self.mixed[end:]
        if not end % TRIM:
            self.keys, self.blocks = self.keys[:], self.blocks[:]
