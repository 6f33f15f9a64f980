"""All runs of one source: from an engine's name, or our hash of a first block, to where the block is.

A block costs some thirty to fifty bytes and no object of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from kvproxy.prefix.precise.engine_hash_map import EngineHashMap
from kvproxy.prefix.precise.run import TRIM, Run

#: Blocks of a run at most, so that cutting one is cheap. A row number is its run's number and a place in it.
SPAN = 1 << 9
_BITS = 9
_LAST = SPAN - 1

#: Runs that 32-bit row numbers can name.
MAX_RUNS = 1 << 32 - _BITS

#: Blocks looked at in search of one, and what a look at a run costs besides, in blocks.
_SEARCHED_BLOCKS, _RUN_COST = 200_000, 20

#: A block: its run and its place there.
Place = tuple[Run, int]


class Runs:
    """The runs of one source. No name is on two blocks and no block in two runs: the caller sees to that."""

    def __init__(self) -> None:
        self.firsts: dict[int, Run] = {}  # by our hash of the first block
        self.blocks = 0
        self._runs: list[Run | None] = [None]  # no row is below SPAN
        self._free: list[int] = []
        self._names = EngineHashMap(_name_of(self._runs))

    def find(self, key: int) -> Place | None:
        """Where the block with this engine's name is."""
        row = self._names.find(key)
        run = self._runs[row >> _BITS]
        return None if run is None else (run, row & _LAST)

    def locate(self, block: int, above: Place | None) -> Place | None:
        """Where our block is, given where the one above it is (None: nowhere)."""
        if above is not None:
            run, at = above
            if at + 1 < len(run.blocks) and run.blocks[at + 1] == block:
                return run, at + 1
        found = self.firsts.get(block)
        return None if found is None else (found, found.start)

    def search(self, block: int) -> Place | None:
        """Where our block is, by a look at all there are, up to a bound. Not to find it costs nothing but a link."""
        left = _SEARCHED_BLOCKS
        for run in self.firsts.values():
            if block in run.blocks[run.start :]:
                return run, run.blocks.index(block, run.start)
            left -= len(run.blocks) + _RUN_COST
            if left < 0:
                return None
        return None

    def append(self, keys: array[int], blocks: array[int], above: Place | None, tier_bit: int) -> Place | None:
        """New blocks below `above`, on one tier; returns where the last one is. None, and nothing changed, when one of
        the names is taken.
        """
        run, done, total = self._room_below(above), 0, len(keys)
        added: list[Place] = []
        rows: list[range] = []
        while done < total:
            if run is None:
                start, end = 0, min(total, done + SPAN)
                run = self._new(keys[done:end], blocks[done:end], tier_bit)
            else:
                start = len(run.keys)
                end = min(total, done + SPAN - start)
                run.extend(keys[done:end], blocks[done:end], tier_bit)
            added.append((run, start))
            first = run.number << _BITS | start
            rows.append(range(first, first + end - done))
            last, run, done = run, None, end
        if not self._names.add(keys, rows):
            self._undo(added)
            return None
        for each, start in added:
            if not start:
                self.firsts[each.blocks[0]] = each
        self.blocks += total
        return last, len(last.keys) - 1

    def drop(self, run: Run, at: int) -> None:
        """Forget one block."""
        self.blocks -= 1
        self._names.drop(run.keys[at], run.number << _BITS | at)
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
        row = run.number << _BITS | at
        self._names.drop(run.keys[at], row)
        run.keys[at] = key
        self._names.add(run.keys[at : at + 1], (range(row, row + 1),))

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
        before, after = run.number << _BITS | at, moved.number << _BITS
        for place, name in enumerate(moved.keys):
            self._names.redirect(name, before + place, after + place)
        return moved

    def _undo(self, added: list[Place]) -> None:
        """Take back the runs that `append` made and what it made longer."""
        for run, start in added:
            if start:
                run.cut(start)
            else:
                self._runs[run.number] = None
                self._free.append(run.number)


def _name_of(runs: list[Run | None]) -> Callable[[int], int | None]:
    """The name a row has. No method: who owns the names would own itself, and go only when the collector comes by."""

    def name_of(row: int) -> int | None:
        run = runs[row >> _BITS]
        return None if run is None else run.keys[row & _LAST]

    return name_of
