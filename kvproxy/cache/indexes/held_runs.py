"""Runs of the approximate index with the endpoints that hold them: split, grown, merged, evicted; and their counts."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.bit_allocator import BitAllocator, slots_of
from kvproxy.cache.indexes.endpoint_lru import EndpointLru
from kvproxy.cache.indexes.heat import Heat, Run
from kvproxy.cache.indexes.radix import PrefixCursor, RadixTree, read_prefix

#: Runs dropped per operation while an endpoint is over its capacity or gone, so that no single call takes long.
STEP_RUNS = 256

#: A run besides its hashes (node, array, table entry), and an endpoint's mark on a run (stamp and record).
_RUN_BYTES = 350
_STAMP_BYTES = 120


class HeldRuns:
    """Tree of runs, an LRU for each endpoint, and the heat of blocks, changed together.

    Every endpoint's blocks are closed under prefixes and, within a bounded number of steps, within its capacity.
    """

    def __init__(self, *, capacity_blocks: int, max_endpoints: int, heat: Heat) -> None:
        self.default_capacity = capacity_blocks
        self.heat = heat
        self.tree: RadixTree[Run] = RadixTree(Run)
        self.slots: BitAllocator[EndpointId] = BitAllocator(limit=max_endpoints)
        self.lrus: dict[int, EndpointLru] = {}  # by slot, retired ones too while their bits remain
        self.present: dict[EndpointId, EndpointLru] = {}
        self.retired: deque[EndpointLru] = deque()

    def enter(self, endpoint: EndpointId) -> EndpointLru | None:
        """Return the endpoint's LRU, made where there is none; None where there is no room."""
        lru = self.present.get(endpoint)
        if lru is None:
            slot = self.slots.assign(endpoint)
            if slot is not None:
                lru = self.present[endpoint] = self.lrus[slot] = EndpointLru(slot, self.default_capacity)
        return lru

    def insert(self, lru: EndpointLru, cursor: PrefixCursor[Run], *, asked_for: bool = False, flight: int = 0) -> None:
        """Have the LRU hold the prompt; its flight, if any, is over."""
        path = self.cover(cursor)
        if flight:
            lru.end_flight(path, flight)
        for run in path:
            if not run.held_by & lru.bit:
                if asked_for and not run.held_by and not run.in_flight_at:
                    self.heat.begin_run(run)  # evicted or contradicted since it was routed
                lru.add_run(run)
            elif lru.unconfirmed:
                lru.unconfirmed.pop(run, None)
        while len(path) > 1 and path[-2].held_by == lru.bit and self._is_mergeable(path[-2], path[-1], lru):
            leaf = path.pop()
            lru.merge_leaf(path[-1], leaf)
            path[-1].take_heat(leaf)
            self.tree.absorb(path[-1], leaf)
        lru.touch_path(path)
        if self.retired or lru.blocks > lru.capacity:
            self.step(lru)

    def _is_mergeable(self, run: Run, leaf: Run, lru: EndpointLru) -> bool:
        """Only this endpoint holds them and nothing else branches off: a chat that grew."""
        return (
            run.held_by == leaf.held_by == lru.bit
            and run in lru.stamps  # held already, not only in flight
            and leaf.child is None
            and leaf.next is leaf.previous is None
            and run.in_flight_at == leaf.in_flight_at
            and not run.in_flight_at & ~lru.bit
            and (not run.in_flight_at or lru.flights.get(run) == lru.flights.get(leaf))
        )

    def cover(self, cursor: PrefixCursor[Run]) -> list[Run]:
        """Run that cover exactly the cursor's hashes, split and grown as needed."""
        if cursor.edits != self.tree.edits:
            self.tree.renew(cursor)
        if cursor.depth < len(cursor.hashes):
            partial = cursor.partial
            self.tree.extend(cursor, None if partial is None else self.split(partial, cursor.inside))
        return cursor.path

    def run_at(self, cursor: PrefixCursor[Run], block: int) -> tuple[Run | None, int]:
        """Return the run that contains `hashes[block]`, and the blocks before it."""
        self.tree.renew(cursor)
        start = 0
        for run in cursor.path:
            if block < start + len(run.hashes):
                return run, start
            start += len(run.hashes)
        return (cursor.partial, start) if block < start + cursor.inside else (None, start)

    def split(self, run: Run, at: int) -> Run:
        """Return a new run of the first `at` hashes, held and in flight where the run is."""
        head = self.tree.split(run, at)
        head.held_by = run.held_by
        head.in_flight_at = run.in_flight_at
        head.take_heat(run)
        for slot in slots_of(run.held_by):
            self.lrus[slot].split_run(head, run)
        for slot in slots_of(run.in_flight_at):
            flights = self.lrus[slot].flights
            flights[head] = set(flights[run])
        return head

    def drop(self, lru: EndpointLru, run: Run) -> None:
        lru.remove_run(run)
        self.clean(run)

    def clean(self, run: Run) -> None:
        """Forget an unused run; nothing below it is in use either."""
        if not run.held_by and not run.in_flight_at:
            self.tree.remove(run)

    def clean_up(self, run: Run | None) -> None:
        """Remove unused runs from this one upwards."""
        while run is not None and run.child is None and not run.held_by and not run.in_flight_at and self.tree.has(run):
            self.tree.remove(run)
            run = run.parent

    def step(self, lru: EndpointLru) -> None:
        """Evict a bounded number of runs, if any are due."""
        if lru.blocks > lru.capacity:
            self._evict(lru, STEP_RUNS)
        if self.retired:
            self.sweep(STEP_RUNS)

    def _evict(self, lru: EndpointLru, runs: int) -> int:
        """Bring the LRU down to its capacity in at most `steps` steps; returns the steps taken (at least one)."""
        steps = 0
        while steps < runs and (surplus := lru.blocks - lru.capacity) > 0:
            run = lru.find_oldest()
            steps += 1
            if len(run.hashes) <= surplus:
                self.drop(lru, run)
            elif run.held_by == lru.bit and not run.in_flight_at:
                self.tree.cut(run, len(run.hashes) - surplus)
                lru.shorten_run(run, surplus)
            else:
                self.split(run, len(run.hashes) - surplus)
                self.drop(lru, run)
        return max(steps, 1)

    def sweep(self, runs: int) -> bool:
        """Drop at most this many runs of endpoints that left; True when nothing is left to sweep."""
        while self.retired and runs > 0:
            runs -= self._evict(self.retired[0], runs)
            if not self.retired[0].blocks:
                lru = self.retired.popleft()
                del self.lrus[lru.slot]
                self.slots.release(lru.slot)
        return not self.retired


class RunCounts:
    """Readings of the held runs: for people, for saved states and for other processes."""

    def __init__(self, held: HeldRuns) -> None:
        self._held = held

    @property
    def entries(self) -> int:
        """(endpoint, block) pairs held, those of endpoints that left included until they are swept."""
        return sum(lru.blocks for lru in self._held.lrus.values())

    @property
    def in_flight_entries(self) -> int:
        """(endpoint, block) pairs of requests in flight."""
        return sum(len(run.hashes) for lru in self._held.lrus.values() for run in lru.flights)

    @property
    def unique_blocks(self) -> int:
        """Blocks that any endpoint holds or has a request in flight for."""
        return self._held.tree.blocks

    @property
    def runs(self) -> int:
        """Runs the blocks are compressed into."""
        return len(self._held.tree)

    @property
    def estimated_bytes(self) -> int:
        """Memory of the tree and of the endpoints' recency, roughly."""
        stamps = sum(len(lru.stamps) for lru in self._held.lrus.values())
        return 8 * self._held.tree.blocks + _RUN_BYTES * len(self._held.tree) + _STAMP_BYTES * stamps

    @property
    def endpoints(self) -> tuple[EndpointId, ...]:
        """Endpoints with a place in the index."""
        return tuple(self._held.slots)

    def held_blocks(self, endpoint: EndpointId) -> int:
        """Blocks the endpoint is estimated to hold."""
        lru = self._held.present.get(endpoint)
        return 0 if lru is None else lru.blocks

    def capacity(self, endpoint: EndpointId) -> int:
        """Return the endpoint's capacity in blocks."""
        lru = self._held.present.get(endpoint)
        return self._held.default_capacity if lru is None else lru.capacity

    def newest_first(self, endpoint: EndpointId) -> Iterator[Run | None]:
        """End of the confirmed paths the endpoint holds, as `EndpointLru.newest_first`; the index may change
        meanwhile."""
        lru = self._held.present.get(endpoint)
        return iter(()) if lru is None else lru.newest_first()

    def all_runs(self) -> list[Run]:
        """Every run, in no order that means anything."""
        return self._held.tree.nodes()

    def requests(self, run: Run) -> float:
        """Decayed requests for the whole run at present; 0 for one that is in the index no more."""
        return self._held.heat.decayed_requests(run) if self._held.tree.has(run) else 0.0

    def prefix(self, run: Run) -> array[int]:
        """All hashes of the prefix that ends with this run."""
        return read_prefix(run)
