"""The approximate index: which endpoint holds which prefix, guessed from where requests were routed and corrected by
responses."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.bit_allocator import BitAllocator, slots_of
from kvproxy.cache.indexes.endpoint_lru import EndpointLru, SpeculativeEntry
from kvproxy.cache.indexes.heat import Heat, Run
from kvproxy.cache.indexes.radix import PrefixCursor, RadixTree

#: Upper bound on an engine's reported capacity: a billion bytes of prompts.
MAX_CAPACITY_BLOCKS = 4 * 1024 * 1024
#: Runs dropped per operation while an endpoint is over its capacity or gone, so that no single call takes long.
STEP_RUNS = 256

#: A run besides its hashes (node, array, table entry), and an endpoint's mark on a run (stamp and record).
_RUN_BYTES = 350
_STAMP_BYTES = 120

_HELD_BY: Callable[[Run], int] = attrgetter("held_by")
_IN_FLIGHT_AT: Callable[[Run], int] = attrgetter("in_flight_at")


class ApproximateIndex:
    """Block hashes (`array('Q')`, chained) by endpoint, each endpoint an LRU of its engine's capacity in blocks.

    A request asks `locate` for its cursor once; all else takes that. Every endpoint's blocks are closed under prefixes,
    so the longest match is found run by run. `heat` counts requests by block, for as long as any endpoint holds it.
    """

    def __init__(self, *, capacity_blocks: int = 65_536, max_endpoints: int = 512, heat: Heat | None = None) -> None:
        self.default_capacity = capacity_blocks
        self.heat = heat or Heat()
        self._tree: RadixTree[Run] = RadixTree(Run)
        #: The place of a prompt in the index, for one request. Changes nothing.
        self.locate = self._tree.locate
        self._slots: BitAllocator[EndpointId] = BitAllocator(limit=max_endpoints)
        self._lrus: dict[int, EndpointLru] = {}  # by slot, retired ones too while their bits remain
        self._present: dict[EndpointId, EndpointLru] = {}
        self._retired: deque[EndpointLru] = deque()
        self._routed = 0

    # what is known

    def lookup(self, cursor: PrefixCursor[Run]) -> dict[EndpointId, int]:
        """Leading blocks each endpoint holds; endpoints that hold none are absent."""
        return self._leading_blocks(cursor, _HELD_BY)

    def lookup_in_flight(self, cursor: PrefixCursor[Run]) -> dict[EndpointId, int]:
        """Leading blocks of which each endpoint has a request in flight, whether it is estimated to hold them or not;
        endpoints without are absent. Only of requests routed with `in_flight`.
        """
        return self._leading_blocks(cursor, _IN_FLIGHT_AT)

    def _leading_blocks(self, cursor: PrefixCursor[Run], bits_of: Callable[[Run], int]) -> dict[EndpointId, int]:
        if cursor.edits != self._tree.edits:
            self._tree.renew(cursor)
        found: dict[EndpointId, int] = {}
        alive = self._slots.active
        depth = 0
        for run in cursor.path:
            gone = alive & ~bits_of(run)
            if gone:
                if depth:
                    self._slots.assign_all(found, gone, depth)
                alive ^= gone
                if not alive:
                    return found
            depth += len(run.hashes)
        if cursor.partial is not None:
            gone = alive & ~bits_of(cursor.partial)
            self._slots.assign_all(found, alive ^ gone, depth + cursor.inside)
            alive = gone
        if depth and alive:
            self._slots.assign_all(found, alive, depth)
        return found

    def hot_blocks(self, cursor: PrefixCursor[Run]) -> int:
        """Leading blocks that are hot, this request included."""
        if cursor.edits != self._tree.edits:
            self._tree.renew(cursor)
        return self.heat.hot_blocks(cursor)

    @property
    def entries(self) -> int:
        """(endpoint, block) pairs held, those of endpoints that left included until they are swept."""
        return sum(lru.blocks for lru in self._lrus.values())

    @property
    def in_flight_entries(self) -> int:
        """(endpoint, block) pairs of requests in flight."""
        return sum(len(run.hashes) for lru in self._lrus.values() for run in lru.flights)

    @property
    def unique_blocks(self) -> int:
        """Blocks that any endpoint holds or has a request in flight for."""
        return self._tree.blocks

    @property
    def runs(self) -> int:
        """Runs the blocks are compressed into."""
        return len(self._tree)

    @property
    def estimated_bytes(self) -> int:
        """Memory of the tree and of the endpoints' recency, roughly."""
        stamps = sum(len(lru.stamps) for lru in self._lrus.values())
        return 8 * self._tree.blocks + _RUN_BYTES * len(self._tree) + _STAMP_BYTES * stamps

    @property
    def endpoints(self) -> tuple[EndpointId, ...]:
        """Endpoints with a place in the index."""
        return tuple(self._slots)

    def held_blocks(self, endpoint: EndpointId) -> int:
        """Blocks the endpoint is estimated to hold."""
        lru = self._present.get(endpoint)
        return 0 if lru is None else lru.blocks

    def capacity(self, endpoint: EndpointId) -> int:
        """Return the endpoint's capacity in blocks."""
        lru = self._present.get(endpoint)
        return self.default_capacity if lru is None else lru.capacity

    def younger_blocks(self, endpoint: EndpointId, cursor: PrefixCursor[Run], block: int) -> int | None:
        """Blocks the endpoint was asked for since it was last asked for `hashes[block]`, to within a 16th of its
        capacity; None if it is not held. An engine that has evicted that block has room for at most so many."""
        lru, (run, _) = self._present.get(endpoint), self._run_at(cursor, block)
        if lru is None or run is None or run not in lru.stamps:
            return None
        return lru.younger_blocks(run)

    def newest_first(self, endpoint: EndpointId) -> Iterator[Run | None]:
        """End of the confirmed paths the endpoint holds, as `EndpointLru.newest_first`; the index may change
        meanwhile."""
        lru = self._present.get(endpoint)
        return iter(()) if lru is None else lru.newest_first()

    def all_runs(self) -> list[Run]:
        """Every run, in no order that means anything."""
        return self._tree.nodes()

    def requests(self, run: Run) -> float:
        """Decayed requests for the whole run at present; 0 for one that is in the index no more."""
        return self.heat.decayed_requests(run) if self._tree.has(run) else 0.0

    def prefix(self, run: Run) -> array[int]:
        """All hashes of the prefix that ends with this run."""
        return self._tree.prefix(run)

    # what changes it

    def route(self, endpoint: EndpointId, cursor: PrefixCursor[Run], *, in_flight: bool = False) -> SpeculativeEntry:
        """Route a request to the endpoint: it counts as holding the prompt until the entry is settled.

        Until then, if `in_flight`, `lookup_in_flight` finds its blocks even after an eviction. However often a request
        is routed, its cursor counts once for the heat of its blocks."""
        self._routed += 1
        lru = self._present.get(endpoint) or self._enter(endpoint)
        if lru is None or not cursor.hashes:
            return SpeculativeEntry(endpoint, cursor, 0, self._routed, None)
        before = lru.blocks
        path = self._cover(cursor)
        known: Run | None = None
        for run in path:
            if not run.held_by & lru.bit:
                lru.add_run(run)
                lru.unconfirmed[run] = {self._routed}
            elif run in lru.unconfirmed:
                lru.unconfirmed[run].add(self._routed)
                known = None
            else:
                known = run
        age = None if known is None else lru.younger_blocks(known)
        if in_flight:
            lru.add_flight(path, self._routed)
        if not cursor.counted:
            cursor.counted = True
            self.heat.count_request(path)
        entry = SpeculativeEntry(endpoint, cursor, lru.blocks - before, self._routed, lru, age, in_flight)
        lru.touch_path(path)
        if self._retired or lru.blocks > lru.capacity:
            self._step(lru)
        return entry

    def confirm(self, entry: SpeculativeEntry) -> None:
        """Confirm that the engine holds the prompt after its answer. Idempotent."""
        lru = entry.lru
        entry.lru = None
        if lru is not None and self._present.get(entry.endpoint) is lru:
            self._insert(lru, entry.cursor, asked_for=True, flight=entry.number if entry.in_flight else 0)

    def rollback(self, entry: SpeculativeEntry) -> None:
        """Roll back the entries of a failed request that no other request confirms. Idempotent."""
        lru = entry.lru
        entry.lru = None
        if lru is None or self._present.get(entry.endpoint) is not lru:
            return
        self._tree.renew(entry.cursor)
        path = entry.cursor.path
        if entry.in_flight:
            lru.end_flight(path, entry.number)
        for run in reversed(path):
            vouching = lru.unconfirmed.get(run)
            if vouching is not None:
                vouching.discard(entry.number)
                if not vouching:
                    lru.remove_run(run)
            self._clean(run)

    def insert(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> None:
        """Insert blocks that the endpoint is known to hold."""
        lru = self._enter(endpoint)
        if lru is not None and cursor.hashes:
            self._insert(lru, cursor)

    def contradict(self, endpoint: EndpointId, cursor: PrefixCursor[Run], cached_blocks: int) -> int:
        """Return the engine had only the first `cached_blocks`: drop the rest and all that extends it. Returns blocks
        dropped.

        An engine evicts from the end, so what extends a missing block is missing too. Where the request itself was
        served, a `confirm` afterwards re-enters its own prompt.
        """
        lru, (run, start) = self._present.get(endpoint), self._run_at(cursor, cached_blocks)
        if lru is None or run is None or not run.held_by & lru.bit:
            return 0
        before = lru.blocks
        if cached_blocks > start:
            self._split(run, cached_blocks - start)  # the rest of `run` begins with the first missing block
        for below in reversed(self._tree.subtree(run)):
            if below.held_by & lru.bit:
                self._drop(lru, below)
        return before - lru.blocks

    def set_capacity(self, endpoint: EndpointId, blocks: int) -> None:
        """Set the engine's known capacity; entries over it are dropped step by step, the oldest first."""
        lru = self._enter(endpoint)
        if lru is not None:
            lru.capacity = min(max(0, blocks), MAX_CAPACITY_BLOCKS)
            self._step(lru)

    def clear(self, endpoint: EndpointId) -> None:
        """Clear an engine's entries after it lost its cache (a restart); its capacity stays."""
        capacity = self.capacity(endpoint)
        self.remove(endpoint)
        self.set_capacity(endpoint, capacity)

    def remove(self, endpoint: EndpointId) -> None:
        """Remove an endpoint that left. Its entries stop counting at once and are swept step by step."""
        slot = self._slots.retire(endpoint)
        if slot is not None:
            lru = self._present.pop(endpoint)
            lru.capacity = 0
            self._retired.append(lru)
            for run in lru.end_all_flights():
                self._clean_up(run)
            self.sweep(STEP_RUNS)

    def sweep(self, runs: int) -> bool:
        """Give up at most so many runs of endpoints that left; True when nothing is left to sweep."""
        while self._retired and runs > 0:
            runs -= self._evict(self._retired[0], runs)
            if not self._retired[0].blocks:
                lru = self._retired.popleft()
                del self._lrus[lru.slot]
                self._slots.release(lru.slot)
        return not self._retired

    # how

    def _enter(self, endpoint: EndpointId) -> EndpointLru | None:
        """Return the endpoint's LRU, made where there is none; None where there is no room."""
        lru = self._present.get(endpoint)
        if lru is None:
            slot = self._slots.assign(endpoint)
            if slot is not None:
                lru = self._present[endpoint] = self._lrus[slot] = EndpointLru(slot, self.default_capacity)
        return lru

    def _insert(self, lru: EndpointLru, cursor: PrefixCursor[Run], *, asked_for: bool = False, flight: int = 0) -> None:
        path = self._cover(cursor)
        if flight:
            lru.end_flight(path, flight)
        for run in path:
            if not run.held_by & lru.bit:
                if (
                    asked_for and not run.held_by and not run.in_flight_at
                ):  # evicted or contradicted since it was routed
                    self.heat.begin_run(run)
                lru.add_run(run)
            elif lru.unconfirmed:
                lru.unconfirmed.pop(run, None)
        while len(path) > 1 and path[-2].held_by == lru.bit and self._is_mergeable(path[-2], path[-1], lru):
            leaf = path.pop()
            lru.merge_leaf(path[-1], leaf)
            self.heat.absorb_leaf(path[-1], leaf)
            self._tree.absorb(path[-1], leaf)
        lru.touch_path(path)
        if self._retired or lru.blocks > lru.capacity:
            self._step(lru)

    def _is_mergeable(self, run: Run, leaf: Run, lru: EndpointLru) -> bool:
        """Only this endpoint holds them and nothing else branches off: a chat that grew."""
        return (
            run.held_by == leaf.held_by == lru.bit
            and run in lru.stamps  # held already, not only in flight
            and leaf.child is None
            and leaf.next is leaf.previous is None
            and run.in_flight_at == leaf.in_flight_at
            and not run.in_flight_at & ~lru.bit
            and lru.have_same_flights(run, leaf)
        )

    def _cover(self, cursor: PrefixCursor[Run]) -> list[Run]:
        """Run that cover exactly the cursor's hashes, split and grown as needed."""
        if cursor.edits != self._tree.edits:
            self._tree.renew(cursor)
        if cursor.depth < len(cursor.hashes):
            partial = cursor.partial
            self._tree.extend(cursor, None if partial is None else self._split(partial, cursor.inside))
        return cursor.path

    def _run_at(self, cursor: PrefixCursor[Run], block: int) -> tuple[Run | None, int]:
        """Return the run that contains `hashes[block]`, and the blocks before it."""
        self._tree.renew(cursor)
        start = 0
        for run in cursor.path:
            if block < start + len(run.hashes):
                return run, start
            start += len(run.hashes)
        return (cursor.partial, start) if block < start + cursor.inside else (None, start)

    def _split(self, run: Run, at: int) -> Run:
        head = self._tree.split(run, at)
        head.held_by = run.held_by
        head.in_flight_at = run.in_flight_at
        self.heat.split_run(head, run, at)
        for slot in slots_of(run.held_by):
            self._lrus[slot].split_run(head, run)
        for slot in slots_of(run.in_flight_at):
            flights = self._lrus[slot].flights
            flights[head] = set(flights[run])
        return head

    def _drop(self, lru: EndpointLru, run: Run) -> None:
        lru.remove_run(run)
        self._clean(run)

    def _clean(self, run: Run) -> None:
        """Forget a run that means nothing any more; nothing below it does either."""
        if not run.held_by and not run.in_flight_at:
            self._tree.remove(run)

    def _clean_up(self, run: Run | None) -> None:
        """Remove unused runs from this one upwards."""
        while (
            run is not None and run.child is None and not run.held_by and not run.in_flight_at and self._tree.has(run)
        ):
            self._tree.remove(run)
            run = run.parent

    def _step(self, lru: EndpointLru) -> None:
        if lru.blocks > lru.capacity:
            self._evict(lru, STEP_RUNS)
        if self._retired:
            self.sweep(STEP_RUNS)

    def _evict(self, lru: EndpointLru, runs: int) -> int:
        """Bring the LRU down to its capacity in at most so many steps; returns the steps taken (at least one)."""
        steps = 0
        while steps < runs and (surplus := lru.blocks - lru.capacity) > 0:
            run = lru.find_oldest()
            steps += 1
            if len(run.hashes) <= surplus:
                self._drop(lru, run)
            elif run.held_by == lru.bit and not run.in_flight_at:
                self._tree.cut(run, len(run.hashes) - surplus)
                self.heat.cut_run(run, len(run.hashes))
                lru.shorten_run(run, surplus)
            else:
                self._split(run, len(run.hashes) - surplus)
                self._drop(lru, run)
        return max(steps, 1)
