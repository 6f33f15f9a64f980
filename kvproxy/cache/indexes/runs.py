"""All blocks of one source as runs: from a block's key, or our hash of a first block, to where the block is.

A key stands for the engine's own hash of a block. A run is columns of machine integers rather than an object a block; a
block costs some hundred bytes, most of them its key's in a plain dict (README.md explains why no smaller table)."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from operator import add
from random import SystemRandom

import msgspec

#: Bits of a block's tiers; bit 0 is the engine's own memory, every other one a lower tier's.
MAX_TIERS = 8
DEVICE = 1
LOWER = 0xFE

#: Bits of a block's key: what a Python integer of 32 bytes holds. Two blocks with one key cost a routing mistake.
KEY_BITS = 60

#: Blocks of a run at most, so that to cut one, and to find a key's place in it, is cheap.
SPAN = 1 << 9
#: Removed tails are returned to the allocator in steps of this many blocks.
TRIM = 64

#: Keys are spread over this many dicts by the remainder, one of these numbers at random, so that no engine can choose
#: all of them for one dict. They grow at different times, since their sizes differ by chance: a single dict of a
#: million keys holds the event loop for 50 ms when it grows.
_SHARDS = (257, 263, 269, 271, 277, 281, 283, 293, 307, 311, 313, 317, 331, 337, 347, 349)

#: Blocks examined in search of one, and the extra cost of examining a run, in blocks.
_SEARCHED_BLOCKS = 200_000
_RUN_COST = 20

_MISSING = {mask: bytes(not tiers & mask for tiers in range(256)) for mask in (DEVICE, LOWER)}


class Run(msgspec.Struct, gc=False, eq=False):
    """Consecutive blocks, each below the one before. Places before `start` are dead. In no cycle, so that no garbage
    collection looks at it."""

    keys: array[int]  # the engine's hashes in its events
    blocks: array[int]  # our hashes
    tiers: int  # bit per tier that all blocks are on, unless `mixed` has it for each
    mixed: bytearray | None = None
    start: int = 0
    found: int = 0  # place last looked for in the middle
    above: int | None = None  # key of the block above the first; None: none, or not known

    def place_of(self, key: int) -> int:
        """Where the block with this key is. Events mostly speak of a run's end, or of neighbours one by one."""
        keys = self.keys
        at = len(keys) - 1
        if keys[at] != key:
            near = self.found
            if self.start < near <= at and keys[near - 1] == key:
                at = near - 1
            elif self.start <= near < at and keys[near + 1] == key:
                at = near + 1
            else:
                at = keys.index(key, self.start)
            self.found = at
        return at

    def count_equal(self, at: int, keys: array[int], blocks: array[int], start: int) -> int:
        """How many blocks of another row, from `start` on, follow at `at` here under the same names."""
        n = min(len(self.keys) - at, len(keys) - start)
        if self.blocks[at : at + n] != blocks[start : start + n]:
            n = next(i for i in range(n) if self.blocks[at + i] != blocks[start + i])
        if self.keys[at : at + n] != keys[start : start + n]:
            n = next(i for i in range(n) if self.keys[at + i] != keys[start + i])
        return n

    def tiers_at(self, at: int) -> int:
        """Tiers of one block, as bits."""
        return self.tiers if self.mixed is None else self.mixed[at]

    def set_tiers(self, at: int, end: int, tiers: int) -> None:
        """Blocks at..end are on these tiers and no other."""
        if at == self.start and end == len(self.keys):
            self.tiers = tiers
            self.mixed = None
            return
        if self.mixed is None:
            if tiers == self.tiers:
                return
            self.mixed = bytearray((self.tiers,)) * len(self.keys)
        self.mixed[at:end] = bytes((tiers,)) * (end - at)
        self._unify(tiers)

    def add_tier(self, at: int, end: int, tier_bit: int) -> None:
        """Blocks at..end are on this tier as well."""
        if self.mixed is None:
            self.set_tiers(at, end, self.tiers | tier_bit)
            return
        for place in range(at, end):
            tiers = self.mixed[place] | tier_bit
            self.mixed[place] = tiers
        self._unify(tiers)

    def extend_blocks(self, keys: array[int], blocks: array[int], tier_bit: int) -> None:
        """Append new blocks, all on one tier."""
        if self.mixed is None and self.tiers != tier_bit:
            self.mixed = bytearray((self.tiers,)) * len(self.keys)
        if self.mixed is not None:
            self.mixed += bytes((tier_bit,)) * len(keys)
        self.keys += keys
        self.blocks += blocks

    def cut_blocks(self, end: int) -> None:
        """Forget the places from `end` on."""
        del self.keys[end:], self.blocks[end:]
        if self.mixed is not None:
            del self.mixed[end:]
        if not end % TRIM:
            self.keys = self.keys[:]
            self.blocks = self.blocks[:]

    def count_leading(self, skip: int, count: int, mask: int) -> int:
        """How many of the first `count` blocks, the first `skip` given, come before one on none of these tiers."""
        if self.mixed is None:
            return count if self.tiers & mask else skip
        found = self.mixed[self.start + skip : self.start + count].translate(_MISSING[mask]).find(1)
        return count if found < 0 else skip + found

    def _unify(self, tiers: int) -> None:
        """Store the tiers once if all blocks are on these by now."""
        mixed = self.mixed
        start = self.start
        if mixed is None or mixed[start] != tiers or mixed[-1] != tiers:
            return
        if mixed.count(tiers, start) == len(mixed) - start:
            self.tiers = tiers
            self.mixed = None


#: A block: its run and its place there.
Place = tuple[Run, int]

#: Key of no block.
_GONE = -1


class Runs:
    """The runs of one source. No key is on two blocks and no block in two runs: the caller sees to that.

    `shards` is a prime number of dicts, random unless given.
    """

    def __init__(self, *, shards: int | None = None) -> None:
        self.firsts: dict[int, Run] = {}  # by our hash of the first block
        self.blocks = 0
        self._shards = SystemRandom().choice(_SHARDS) if shards is None else shards
        self._by_key: list[dict[int, Run]] = [{} for _ in range(self._shards)]

    def find_key(self, key: int) -> Place | None:
        """Where the block with this key is; good until the next change."""
        run = self._by_key[key % self._shards].get(key)
        return None if run is None else (run, run.place_of(key))

    def locate_block(self, block: int, above: Place | None) -> Place | None:
        """Where our block is, given where the one above it is (None: nowhere)."""
        if above is not None:
            run, at = above
            if at + 1 < len(run.blocks) and run.blocks[at + 1] == block:
                return run, at + 1
        found = self.firsts.get(block)
        return None if found is None else (found, found.start)

    def search_block(self, block: int) -> Place | None:
        """Where our block is, by a look at all there are, up to a bound. Not to find it costs nothing but a link."""
        left = _SEARCHED_BLOCKS
        for run in self.firsts.values():
            if block in run.blocks[run.start :]:
                return run, run.blocks.index(block, run.start)
            left -= len(run.blocks) + _RUN_COST
            if left < 0:
                return None
        return None

    def append_blocks(self, keys: array[int], blocks: array[int], above: Place | None, tier_bit: int) -> Place | None:
        """Append new blocks below `above`, on one tier; returns where the last one is. None, and nothing changed, when
        one of the keys is taken."""
        run = higher = None
        if above is not None:
            last, at = above
            higher = last.keys[at]
            if at == len(last.keys) - 1 < SPAN - 1:
                run = last
        done = 0
        total = len(keys)
        added: list[Place] = []
        while done < total:
            if run is None:
                start = 0
                end = min(total, done + SPAN)
                piece = keys[done:end]
                run = Run(piece, blocks[done:end], tier_bit, above=higher)
            else:
                start = len(run.keys)
                end = min(total, done + SPAN - start)
                piece = keys[done:end]
                run.extend_blocks(piece, blocks[done:end], tier_bit)
            added.append((run, start))
            if not self._enter(piece, run):
                self._undo(added)
                return None
            last = run
            run = None
            higher = keys[end - 1]
            done = end
        for each, start in added:
            if not start:
                self.firsts[each.blocks[0]] = each
        self.blocks += total
        return last, len(last.keys) - 1

    def drop_block(self, run: Run, at: int) -> None:
        """Forget one block."""
        self.blocks -= 1
        key = run.keys[at]
        del self._by_key[key % self._shards][key]
        if at == len(run.keys) - 1:
            if at == run.start:
                del self.firsts[run.blocks[at]]
            else:
                run.cut_blocks(at)
        elif at == run.start:
            del self.firsts[run.blocks[at]]
            self._begin(run, at + 1)
        elif at - run.start < len(run.keys) - at:
            self._move(run, run.start, at)
            self._begin(run, at + 1)
        else:
            self._move(run, at + 1, len(run.keys))
            run.cut_blocks(at)

    def rename_block(self, run: Run, at: int, key: int) -> None:
        """Rename a block to a key that is not taken."""
        former = run.keys[at]
        del self._by_key[former % self._shards][former]
        run.keys[at] = key
        self._by_key[key % self._shards][key] = run

    def sweep_rows(self, rows: int) -> int:
        """Drop about this many rows of retired runs. Returns the rest of the budget: 0 or less until nothing is
        left."""
        while self._by_key and rows > 0:
            keys = len(self._by_key.pop())
            self.blocks -= keys
            rows -= keys
        while self.firsts and rows > 0:
            self.firsts.popitem()
            rows -= 1
        return rows

    def walk_tiers(self) -> Iterator[tuple[int, int]]:
        """Yield all tiers piece by piece: bits of tiers, and how many blocks have these. Changes during the walk may be
        missed."""
        for run in list(self.firsts.values()):
            if run.mixed is None:
                yield run.tiers, len(run.blocks) - run.start
            else:
                yield from Counter(run.mixed[run.start :]).items()

    def walk_up(self, place: Place) -> array[int] | None:
        """Return our hashes of the blocks from the top down to this one; None: one of them is not there."""
        pieces: list[array[int]] = []
        run, at = place
        while True:
            pieces.append(run.blocks[run.start : at + 1])
            if run.above is None:
                return reduce(add, reversed(pieces))
            found = self.find_key(run.above)
            if found is None:
                return None
            run, at = found

    def _enter(self, keys: array[int], run: Run) -> bool:
        """Point these keys to the run; False, and nothing changed, when one is taken or comes twice."""
        by_key = self._by_key
        shards = self._shards
        for key in keys:
            shard = by_key[key % shards]
            if key in shard:
                for each in keys[: keys.index(key)]:
                    del by_key[each % shards][each]
                return False
            shard[key] = run
        return True

    def _begin(self, run: Run, start: int) -> None:
        """Begin the run at `start`, below a block that is dropped; if most of it is before that, the rest moves out."""
        run.start = start
        run.above = _GONE
        if 4 * start > 3 * len(run.keys) and start >= TRIM:
            self._move(run, start, len(run.keys))
        else:
            self.firsts[run.blocks[start]] = run

    def _move(self, run: Run, at: int, end: int) -> None:
        """Move these places' blocks to a new run; the caller cuts them off the old one."""
        moved = Run(run.keys[at:end], run.blocks[at:end], run.tiers)
        moved.above = run.above if at == run.start else run.keys[at - 1]
        if run.mixed is not None:
            moved.mixed = run.mixed[at:end]
        for key in moved.keys:
            self._by_key[key % self._shards][key] = moved
        self.firsts[moved.blocks[0]] = moved

    def _undo(self, added: list[Place]) -> None:
        """Take back the runs that `append` made and what it made longer; keys of the last of them were not entered."""
        for run, start in added[:-1]:
            for key in run.keys[start:]:
                del self._by_key[key % self._shards][key]
        for run, start in added:
            if start:
                run.cut_blocks(start)
