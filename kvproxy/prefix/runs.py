"""All runs of one source: from an engine's name, or our hash of a first block, to where the block is.

A block costs some thirty bytes and no object of its own: a hash table of row numbers, chained through a column of the
runs, leads from an engine's name to its row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvproxy.prefix.run import TRIM, Run

#: Blocks of a run at most, so that cutting one is cheap. A row number is its run's number and a place in it.
SPAN = 1 << 9
_BITS = 9
_LAST = SPAN - 1

#: Runs that 32-bit row numbers can name.
MAX_RUNS = 1 << 32 - _BITS

#: Sizes of the hash table: primes, so that no regularity in an engine's names makes chains long.
_SIZES = (37, 131, 521, 2053, 8209, 32_771, 131_101, 524_309, 2_097_169, 8_388_617)

#: A block: its run and its place there.
Place = tuple[Run, int]


class Runs:
    """The runs of one source. No name is on two blocks and no block in two runs: the caller sees to that."""

    def __init__(self) -> None:
        self.firsts: dict[int, Run] = {}  # by our hash of the first block
        self.blocks = 0
        self._runs: list[Run | None] = [None]  # row 0 is the end of every chain
        self._free: list[int] = []
        self._heads = array("I", bytes(4 * _SIZES[0]))

    def find(self, key: int) -> Place | None:
        """Where the block with this engine's name is."""
        row = self._heads[key % len(self._heads)]
        while row:
            run, at = self._runs[row >> _BITS], row & _LAST
            assert run is not None
            if run.keys[at] == key:
                return run, at
            row = run.links[at]
        return None

    def locate(self, block: int, above: Place | None) -> Place | None:
        """Where our block is, given where the one above it is (None: nowhere)."""
        if above is not None:
            run, at = above
            if at + 1 < len(run.blocks) and run.blocks[at + 1] == block:
                return run, at + 1
        found = self.firsts.get(block)
        return None if found is None else (found, found.start)

    def search(self, block: int) -> Place | None:
        """Where our block is, by a look at all there are."""
        for run in self.firsts.values():
            if block in run.blocks[run.start :]:
                return run, run.blocks.index(block, run.start)
        return None

    def append(self, keys: array[int], blocks: array[int], above: Place | None, tier_bit: int) -> Place | None:
        """New blocks below `above`, on one tier; returns where the last one is. None, and nothing changed, when one of
        the names is taken.
        """
        if 2 * (self.blocks + len(keys)) > len(self._heads):
            self._grow(2 * (self.blocks + len(keys)))
        added: list[Place] = []
        run, done, total = self._room_below(above), 0, len(keys)
        while done < total:
            if run is None:
                start, end = 0, min(total, done + SPAN)
                run = self._new(keys[done:end], blocks[done:end], tier_bit)
            else:
                start = len(run.keys)
                end = min(total, done + SPAN - start)
                run.extend(keys[done:end], blocks[done:end], tier_bit)
            added.append((run, start))
            if not self._link(run, start):
                self._undo(added)
                return None
            last, run, done = run, None, end
        for each, start in added:
            if not start:
                self.firsts[each.blocks[0]] = each
        self.blocks += total
        return last, len(last.keys) - 1

    def drop(self, run: Run, at: int) -> None:
        """Forget one block."""
        self.blocks -= 1
        self._redirect(run, at, run.links[at])
        if at == len(run.keys) - 1:
            if at == run.start:
                self._give_back(run)
            else:
                run.cut(at)
        elif at == run.start:
            del self.firsts[run.blocks[at]]
            self._begin(run, at + 1)
        elif at - run.start < len(run.keys) - at:
            head = self._move(run, run.start, at)
            self.firsts[head.blocks[0]] = head
            self._begin(run, at + 1)
        else:
            tail = self._move(run, at + 1, len(run.keys))
            self.firsts[tail.blocks[0]] = tail
            run.cut(at)

    def rename(self, run: Run, at: int, key: int) -> None:
        """The block goes by another name, which is not taken."""
        self._redirect(run, at, run.links[at])
        run.keys[at] = key
        slot = key % len(self._heads)
        run.links[at] = self._heads[slot]
        self._heads[slot] = run.number << _BITS | at

    def sweep(self, blocks: int) -> None:
        """Give up so many blocks, and those of the last run, of what nobody uses any more."""
        while self.firsts and blocks > 0:
            _, run = self.firsts.popitem()
            live = len(run.keys) - run.start
            self._runs[run.number] = None
            self.blocks -= live
            blocks -= live

    def _room_below(self, above: Place | None) -> Run | None:
        if above is not None and above[1] == len(above[0].keys) - 1 < _LAST:
            return above[0]
        return None

    def _new(self, keys: array[int], blocks: array[int], tiers: int) -> Run:
        if self._free:
            number = self._free.pop()
            run = self._runs[number] = Run(number, keys, blocks, tiers)
        else:
            run = Run(len(self._runs), keys, blocks, tiers)
            self._runs.append(run)
        return run

    def _give_back(self, run: Run) -> None:
        del self.firsts[run.blocks[run.start]]
        self._runs[run.number] = None
        self._free.append(run.number)

    def _begin(self, run: Run, start: int) -> None:
        """What is before `start` is not the run's any more; where that is most of it, the rest moves out."""
        run.start = start
        if 4 * start > 3 * len(run.keys) and start >= TRIM:
            self.firsts[run.blocks[start]] = run
            rest = self._move(run, start, len(run.keys))
            self._give_back(run)
            self.firsts[rest.blocks[0]] = rest
        else:
            self.firsts[run.blocks[start]] = run

    def _move(self, run: Run, at: int, end: int) -> Run:
        """A new run of these places' blocks; they are still in the old one, but no name leads there."""
        moved = self._new(run.keys[at:end], run.blocks[at:end], run.tiers)
        if run.mixed is not None:
            moved.mixed = run.mixed[at:end]
        row = moved.number << _BITS
        for place in range(at, end):
            moved.links[place - at] = run.links[place]
            self._redirect(run, place, row)
            row += 1
        return moved

    def _redirect(self, run: Run, at: int, to: int) -> None:
        """Whatever points to this row points to another one from now on."""
        heads, sought = self._heads, run.number << _BITS | at
        slot = run.keys[at] % len(heads)
        row = heads[slot]
        if row == sought:
            heads[slot] = to
            return
        while True:
            other, place = self._runs[row >> _BITS], row & _LAST
            assert other is not None
            row = other.links[place]
            if row == sought:
                other.links[place] = to
                return

    def _link(self, run: Run, start: int) -> bool:
        """Make the names from place `start` on known; False at the first that is known already."""
        runs, heads, links = self._runs, self._heads, run.links
        keys, size = run.keys[start:] if start else run.keys, len(heads)
        for row, key in enumerate(keys, run.number << _BITS | start):
            slot = key % size
            if known := heads[slot]:
                links[row & _LAST] = known
                while known:
                    other: Run = runs[known >> _BITS]  # type: ignore[assignment]
                    at = known & _LAST
                    if other.keys[at] == key:
                        del links[row & _LAST :]
                        return False
                    known = other.links[at]
            heads[slot] = row
        return True

    def _undo(self, added: Sequence[Place]) -> None:
        """Take back what `append` did, the last first."""
        heads = self._heads
        for run, start in reversed(added):
            while len(run.links) > start:
                key = run.keys[len(run.links) - 1]
                heads[key % len(heads)] = run.links.pop()
            if start:
                run.cut(start)
            else:
                self._runs[run.number] = None
                self._free.append(run.number)

    def _grow(self, slots: int) -> None:
        """A larger hash table; four times as many slots at least, so that it comes seldom."""
        size = next((size for size in _SIZES if size >= slots), _SIZES[-1])
        if size == len(self._heads):
            return
        heads = self._heads = array("I", bytes(4 * size))
        for run in self._runs:
            if run is None:
                continue
            links, start = [0] * run.start, run.start
            for row, slot in enumerate([key % size for key in run.keys[start:]], run.number << _BITS | start):
                links.append(heads[slot])
                heads[slot] = row
            run.links = array("I", links)
