"""The approximate index: which endpoint holds which prefix, guessed from where requests were routed and corrected by
responses."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Heat, Run
from kvproxy.cache.indexes.held_runs import STEP_RUNS, HeldRuns, RunCounts
from kvproxy.cache.indexes.radix import PrefixCursor, list_subtree

#: Upper bound on an engine's reported capacity: a billion bytes of prompts.
MAX_CAPACITY_BLOCKS = 4 * 1024 * 1024
_HELD_BY: Callable[[Run], int] = attrgetter("held_by")
_IN_FLIGHT_AT: Callable[[Run], int] = attrgetter("in_flight_at")


class ApproximateIndex:
    """Block hashes (`array('Q')`, chained) by endpoint, each endpoint an LRU of its engine's capacity in blocks.

    A request asks `locate` for its cursor once; all else takes that. Every endpoint's blocks are closed under prefixes,
    so the longest match is found run by run. `heat` counts requests by block, for as long as any endpoint holds it;
    `counts` are readings that change nothing.
    """

    def __init__(self, *, capacity_blocks: int = 65_536, max_endpoints: int = 4096, heat: Heat | None = None) -> None:
        self.heat = heat or Heat()
        self._held = HeldRuns(capacity_blocks=capacity_blocks, max_endpoints=max_endpoints, heat=self.heat)
        self._tree = self._held.tree
        self._slots = self._held.slots
        self._present = self._held.present
        self.counts = RunCounts(self._held)
        #: The place of a prompt in the index, for one request. Changes nothing.
        self.locate = self._tree.locate
        #: Give up at most so many runs of endpoints that left; True when nothing is left to sweep.
        self.sweep = self._held.sweep
        self._routed = 0

    def lookup_in_flight(self, cursor: PrefixCursor[Run], worth: Callable[[int], int] = int) -> dict[EndpointId, int]:
        """Leading blocks of which each endpoint has a request in flight, whether it is estimated to hold them or not;
        endpoints without are absent. Only of requests routed with `in_flight`.
        """
        return self.lookup(cursor, worth, _IN_FLIGHT_AT)

    def lookup(
        self, cursor: PrefixCursor[Run], worth: Callable[[int], int] = int, bits_of: Callable[[Run], int] = _HELD_BY
    ) -> dict[EndpointId, int]:
        """Leading blocks each endpoint holds, or `worth` of these; endpoints that hold none are absent."""
        if cursor.edits != self._tree.edits:
            self._tree.renew(cursor)
        found: dict[EndpointId, int] = {}
        alive = self._slots.active
        depth = 0
        for run in cursor.path:
            gone = alive & ~bits_of(run)
            if gone:
                if depth:
                    self._slots.assign_all(found, gone, worth(depth))
                alive ^= gone
                if not alive:
                    return found
            depth += len(run.hashes)
        if cursor.partial is not None:
            gone = alive & ~bits_of(cursor.partial)
            self._slots.assign_all(found, alive ^ gone, worth(depth + cursor.inside))
            alive = gone
        if depth and alive:
            self._slots.assign_all(found, alive, worth(depth))
        return found

    def hot_blocks(self, cursor: PrefixCursor[Run]) -> int:
        """Leading blocks that are hot, this request included."""
        if cursor.edits != self._tree.edits:
            self._tree.renew(cursor)
        return self.heat.hot_blocks(cursor)

    def route(
        self, endpoint: EndpointId, cursor: PrefixCursor[Run], *, in_flight: bool = False, number: int = 0
    ) -> SpeculativeEntry:
        """Route a request to the endpoint: it counts as holding the prompt until the entry is settled.

        Until then, if `in_flight`, `lookup_in_flight` finds its blocks even after an eviction. However often a request
        is routed, its cursor counts once for the heat of its blocks. `number`: of its earlier entry."""
        if not number:
            number = self._routed = self._routed + 1
        lru = self._present.get(endpoint) or self._held.enter(endpoint)
        if lru is None or not cursor.hashes:
            return SpeculativeEntry(endpoint, cursor, 0, number, None, in_flight=in_flight)
        before = lru.blocks
        path = self._held.cover(cursor)
        known: Run | None = None
        for run in path:
            if not run.held_by & lru.bit:
                lru.add_run(run)
                lru.unconfirmed[run] = {number}
            elif run in lru.unconfirmed:
                lru.unconfirmed[run].add(number)
                known = None
            else:
                known = run
        age = None if known is None else lru.ages.count_younger(lru.stamps[known])
        if in_flight:
            lru.add_flight(path, number)
        if not cursor.counted:
            cursor.counted = True
            self.heat.count_request(path)
        entry = SpeculativeEntry(endpoint, cursor, lru.blocks - before, number, lru, age, in_flight)
        lru.touch_path(path)
        if self._held.retired or lru.blocks > lru.capacity:
            self._held.step(lru)
        return entry

    def move(self, entry: SpeculativeEntry, endpoint: EndpointId, *, kept: bool) -> SpeculativeEntry:
        """Return the entry of a request whose prompt another endpoint computes or pulls; the earlier one has `kept` it,
        or never computed it."""
        (self.confirm if kept else self.rollback)(entry)
        return self.route(endpoint, entry.cursor, in_flight=entry.in_flight, number=entry.number)

    def confirm(self, entry: SpeculativeEntry) -> None:
        """Confirm that the engine holds the prompt after its answer. Idempotent."""
        lru = entry.lru
        entry.lru = None
        if lru is not None and self._present.get(entry.endpoint) is lru:
            self._held.insert(lru, entry.cursor, asked_for=True, flight=entry.number if entry.in_flight else 0)

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
            self._held.clean(run)

    def insert(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> None:
        """Insert blocks that the endpoint is known to hold."""
        lru = self._held.enter(endpoint)
        if lru is not None and cursor.hashes:
            self._held.insert(lru, cursor)

    def contradict(self, endpoint: EndpointId, cursor: PrefixCursor[Run], cached_blocks: int) -> int:
        """Return the engine had only the first `cached_blocks`: drop the rest and all that extends it. Returns blocks
        dropped.

        An engine evicts from the end, so what extends a missing block is missing too. Where the request itself was
        served, a `confirm` afterwards re-enters its own prompt.
        """
        lru, (run, start) = self._present.get(endpoint), self._held.run_at(cursor, cached_blocks)
        if lru is None or run is None or not run.held_by & lru.bit:
            return 0
        before = lru.blocks
        if cached_blocks > start:
            self._held.split(run, cached_blocks - start)  # the rest of `run` begins with the first missing block
        for below in reversed(list_subtree(run)):
            if below.held_by & lru.bit:
                self._held.drop(lru, below)
        return before - lru.blocks

    def set_capacity(self, endpoint: EndpointId, blocks: int) -> None:
        """Set the engine's known capacity; entries over it are dropped step by step, the oldest first."""
        lru = self._held.enter(endpoint)
        if lru is not None:
            lru.capacity = min(max(0, blocks), MAX_CAPACITY_BLOCKS)
            self._held.step(lru)

    def clear(self, endpoint: EndpointId) -> None:
        """Clear an engine's entries after it lost its cache (a restart); its capacity stays."""
        capacity = self.counts.capacity(endpoint)
        self.remove(endpoint)
        self.set_capacity(endpoint, capacity)

    def remove(self, endpoint: EndpointId) -> None:
        """Remove an endpoint that left. Its entries stop counting at once and are swept step by step."""
        slot = self._slots.retire(endpoint)
        if slot is not None:
            lru = self._present.pop(endpoint)
            lru.capacity = 0
            self._held.retired.append(lru)
            for run in lru.end_all_flights():
                self._held.clean_up(run)
            self.sweep(STEP_RUNS)
