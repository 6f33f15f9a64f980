"""One endpoint's entries in the approximate index, in the order its engine would evict them. Pure bookkeeping."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.indexes.radix import PrefixCursor

#: A capacity's share that a generation is full at, and so the resolution.
GENERATIONS = 16
#: Generations before neighbours are merged; the sum over them is the cost of an answer.
_MOST_GENERATIONS = 3 * GENERATIONS


class AgeHistogram:
    """Blocks by the number of their latest touch, in generations of consecutive touches.

    An LRU cache of N blocks holds what fewer than N blocks are younger than. Exact to within one generation.
    """

    __slots__ = ("_blocks", "_first")

    def __init__(self) -> None:
        self._first = [0]  # touch each generation begins with, rising
        self._blocks = [0]  # with their latest touch in it

    def touch_runs(self, runs: Sequence[Run], stamps: dict[Run, int], touch: int, span: int) -> None:
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
        """Blocks touched since, half of the touch's own generation among them, which is to within a sixteenth of the
        capacity: an engine that evicted what was touched then has room for at most about this many."""
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


class EndpointLru:
    """Recency by touch: touch number n is record n, and a run's stamp is its latest touch.

    A touch covers a whole path, so an ancestor is never older than its descendants, and the oldest record leads to the
    run that engines evict first: the end of the least recently requested prompt."""

    __slots__ = ("_front", "_records", "ages", "bit", "blocks", "capacity", "flights", "slot", "stamps", "unconfirmed")

    def __init__(self, slot: int, capacity: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.capacity = capacity  # 0 as well when the endpoint left
        self.blocks = 0
        self.stamps: dict[Run, int] = {}
        self.unconfirmed: dict[Run, set[int]] = {}  # runs no response confirmed yet: the requests that vouch for them
        self.flights: dict[Run, set[int]] = {}  # runs of requests in flight, held or not: those requests
        self._records: deque[Run] = deque()  # last run of each touched path
        self._front = 0  # number of the first record
        self.ages = AgeHistogram()

    def touch_path(self, path: list[Run]) -> None:
        """Mark the path as requested just now."""
        stamp = self._front + len(self._records)
        self.ages.touch_runs(path, self.stamps, stamp, self.capacity // GENERATIONS)
        self._records.append(path[-1])
        if len(self._records) > 2 * len(self.stamps) + 64:
            self._compact()

    def add_run(self, run: Run) -> None:
        """Count the run in; a touch follows."""
        run.held_by |= self.bit
        self.blocks += len(run.hashes)

    def remove_run(self, run: Run) -> None:
        """Count the run out. Nothing below it may be held."""
        run.held_by &= ~self.bit
        self.blocks -= len(run.hashes)
        self.ages.change_count(self.stamps.pop(run), -len(run.hashes))
        self.unconfirmed.pop(run, None)

    def shorten_run(self, run: Run, blocks: int) -> None:
        """Count blocks out at the end of the run."""
        self.blocks -= blocks
        self.ages.change_count(self.stamps[run], -blocks)

    def merge_leaf(self, run: Run, leaf: Run) -> None:
        """`leaf`, perhaps new, becomes the end of `run`; a touch follows."""
        self.flights.pop(leaf, None)  # as those of the run
        stamp = self.stamps.pop(leaf, None)
        above = self.stamps[run]
        if stamp == above:
            return
        if stamp is not None:
            self.ages.change_count(stamp, -len(leaf.hashes))
        self.ages.change_count(above, len(leaf.hashes))

    def split_run(self, head: Run, tail: Run) -> None:
        """`head` was split off `tail`, which is held: same recency, same requests that vouch for it."""
        self.stamps[head] = self.stamps[tail]
        vouching = self.unconfirmed.get(tail)
        if vouching is not None:
            self.unconfirmed[head] = set(vouching)

    def add_flight(self, path: list[Run], number: int) -> None:
        """Add a request in flight for the whole path."""
        flights = self.flights
        for run in path:
            numbers = flights.get(run)
            if numbers is None:
                flights[run] = {number}
                run.in_flight_at |= self.bit
            else:
                numbers.add(number)

    def end_flight(self, path: list[Run], number: int) -> None:
        """End a request in flight."""
        for run in path:
            numbers = self.flights.get(run)
            if numbers is None:
                continue
            numbers.discard(number)
            if not numbers:
                del self.flights[run]
                run.in_flight_at &= ~self.bit

    def end_all_flights(self) -> list[Run]:
        """End all requests in flight; returns their runs."""
        ended = [*self.flights]
        self.flights.clear()
        for run in ended:
            run.in_flight_at &= ~self.bit
        return ended

    def find_oldest(self) -> Run:
        """Return the run to evict next; nothing below it is held. Only while anything is held."""
        while (run := self._tip(self._front, self._records[0])) is None:
            self._records.popleft()
            self._front += 1
        return run

    def newest_first(self) -> Iterator[Run | None]:
        """Yield confirmed ends of touched paths, the latest request first; None where a touch left nothing of its own.

        Entries may change between two steps: each step uses the current ones."""
        covered: set[Run] = set()
        for last in reversed(tuple(self._records)):
            run: Run | None = last
            while run is not None and (run not in self.stamps or run in self.unconfirmed):
                run = run.parent
            if run is None or run in covered:
                yield None
                continue
            above: Run | None = run
            while above is not None and above not in covered:
                covered.add(above)
                above = above.parent
            yield run

    def _tip(self, stamp: int, run: Run | None) -> Run | None:
        """Return what is left of the path that touch number `stamp` ended with, if nothing touched it since."""
        while run is not None and run not in self.stamps:  # removed since: its ancestors may be as old
            run = run.parent
        return run if run is not None and self.stamps[run] == stamp else None

    def _compact(self) -> None:
        """Forget records no run's stamp refers to, and renumber the rest."""
        live = set(self.stamps.values())
        kept: deque[Run] = deque()
        number = {}
        for stamp, run in enumerate(self._records, self._front):
            if stamp in live:
                number[stamp] = len(kept)
                kept.append(run)
        self.stamps = {run: number[stamp] for run, stamp in self.stamps.items()}
        self.ages.renumber_touches(list(number))
        self._records = kept
        self._front = 0


class SpeculativeEntry(msgspec.Struct, eq=False):
    """One routed request's speculative entry: confirm it or roll it back, once."""

    endpoint: EndpointId
    cursor: PrefixCursor[Run]
    new_blocks: int  # not assigned to the endpoint before
    number: int
    lru: EndpointLru | None  # None once settled, or when the index had no room for the endpoint
    # blocks requested since the last of the known blocks was; None: none, or not confirmed yet
    age_blocks: int | None = None
    in_flight: bool = False  # counted among the requests in flight as well

    @property
    def hashes(self) -> array[int]:
        """The whole prompt's."""
        return self.cursor.hashes
