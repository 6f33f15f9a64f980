"""The approximate index: who holds which prefix, guessed from what was routed where and corrected by responses."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator

from kvproxy.prefix.approximate.bit_allocator import BitAllocator, slots_of
from kvproxy.prefix.approximate.endpoint_lru import EndpointLru, Run, SpeculativeEntry
from kvproxy.prefix.approximate.radix import RadixTree
from kvproxy.types import EndpointId

#: Runs given up per operation while an endpoint is over its capacity or gone, so that no single call takes long.
STEP_RUNS = 256

#: A run besides its hashes (node, array, table entry), and an endpoint's mark on a run (stamp and record).
_RUN_BYTES, _STAMP_BYTES = 350, 120


class ApproximateIndex:
    """Block hashes (`array('Q')`, chained) by endpoint, each endpoint an LRU of its engine's capacity in blocks.

    Every endpoint's blocks are closed under prefixes, so the longest match is found run by run.
    """

    def __init__(self, *, capacity_blocks: int = 65_536, max_endpoints: int = 512) -> None:
        self.default_capacity = capacity_blocks
        self._tree: RadixTree[Run] = RadixTree(Run)
        self._slots: BitAllocator[EndpointId] = BitAllocator(limit=max_endpoints)
        self._holdings: dict[int, EndpointLru] = {}  # by slot, retired ones too while their bits remain
        self._retired: deque[EndpointLru] = deque()
        self._claims = 0

    # what is known

    def lookup(self, hashes: array[int]) -> dict[EndpointId, int]:
        """Leading blocks each endpoint holds; endpoints that hold none are absent."""
        path, _, partial, inside = self._tree.walk(hashes)
        found: dict[EndpointId, int] = {}
        alive = self._slots.active
        depth = 0
        for run in path:
            gone = alive & ~run.mask
            if gone:
                self._report(found, gone, depth)
                alive ^= gone
                if not alive:
                    return found
            depth += len(run.hashes)
        if partial is not None:
            gone = alive & ~partial.mask
            self._report(found, alive ^ gone, depth + inside)
            alive = gone
        self._report(found, alive, depth)
        return found

    def promised(self, hashes: array[int]) -> dict[EndpointId, int]:
        """Leading blocks of which each endpoint has a request under way, whether it is believed to hold them or not;
        endpoints without are absent. Only of requests routed with `flies`.
        """
        path, _, partial, inside = self._tree.walk(hashes)
        found: dict[EndpointId, int] = {}
        alive = self._slots.active
        depth = 0
        for run in path:
            gone = alive & ~run.flying
            if gone:
                self._report(found, gone, depth)
                alive ^= gone
                if not alive:
                    return found
            depth += len(run.hashes)
        if partial is not None:
            gone = alive & ~partial.flying
            self._report(found, alive ^ gone, depth + inside)
            alive = gone
        self._report(found, alive, depth)
        return found

    def _report(self, found: dict[EndpointId, int], mask: int, depth: int) -> None:
        if depth and mask:
            for member in self._slots.members(mask):
                found[member] = depth

    @property
    def entries(self) -> int:
        """(endpoint, block) pairs held, those of endpoints that left included until they are swept."""
        return sum(holding.blocks for holding in self._holdings.values())

    @property
    def promises(self) -> int:
        """(endpoint, block) pairs of requests under way."""
        return sum(len(run.hashes) for holding in self._holdings.values() for run in holding.flights)

    @property
    def runs(self) -> int:
        """Runs the blocks are compressed into."""
        return len(self._tree)

    @property
    def estimated_bytes(self) -> int:
        """Memory of the tree and of the endpoints' recency, roughly."""
        stamps = sum(len(holding.stamps) for holding in self._holdings.values())
        return 8 * self._tree.blocks + _RUN_BYTES * len(self._tree) + _STAMP_BYTES * stamps

    @property
    def endpoints(self) -> tuple[EndpointId, ...]:
        """Endpoints with a place in the index."""
        return tuple(self._slots)

    def blocks(self, endpoint: EndpointId) -> int:
        """Blocks the endpoint is believed to hold."""
        holding = self._known(endpoint)
        return 0 if holding is None else holding.blocks

    def capacity(self, endpoint: EndpointId) -> int:
        """The endpoint's capacity in blocks."""
        holding = self._known(endpoint)
        return self.default_capacity if holding is None else holding.capacity

    def younger_blocks(self, endpoint: EndpointId, hashes: array[int], block: int) -> int | None:
        """Blocks the endpoint was asked for since it was last asked for `hashes[block]`, to within a 16th of its
        capacity; None if it is not held. An engine that has evicted that block has room for at most so many."""
        holding = self._known(endpoint)
        run = self._run_at(hashes, block)
        if holding is None or run is None or run not in holding.stamps:
            return None
        return holding.younger_blocks(run)

    def newest_first(self, endpoint: EndpointId) -> Iterator[Run | None]:
        """Ends of the confirmed paths the endpoint holds, as `Holding.newest_first`; the index may change meanwhile."""
        holding = self._known(endpoint)
        return iter(()) if holding is None else holding.newest_first()

    # what changes it

    def route(self, endpoint: EndpointId, hashes: array[int], *, flies: bool = False) -> SpeculativeEntry:
        """A request goes to the endpoint: from now on it counts as holding the prompt, until the claim is settled.

        Until then, if it `flies`, its blocks are `promised`, whatever else becomes of them.
        """
        self._claims += 1
        holding = self._holding(endpoint)
        if holding is None or not hashes:
            return SpeculativeEntry(endpoint, hashes, 0, self._claims, None)
        before = holding.blocks
        path = self._path(hashes)
        known: Run | None = None
        for run in path:
            if not run.mask & holding.mask:
                holding.take(run)
                holding.claims[run] = {self._claims}
            elif run in holding.claims:
                holding.claims[run].add(self._claims)
                known = None
            else:
                known = run
        age = None if known is None else holding.younger_blocks(known)
        claim = SpeculativeEntry(endpoint, hashes, holding.blocks - before, self._claims, holding, age, flies)
        if flies:
            holding.fly(path, self._claims)
        holding.touch(path)
        self._step(holding)
        return claim

    def confirm(self, claim: SpeculativeEntry) -> None:
        """The engine answered: it does hold the prompt now. Idempotent."""
        holding, claim.holding = claim.holding, None
        if holding is not None and self._known(claim.endpoint) is holding:
            self._insert(holding, claim.hashes, landing=claim.number if claim.flies else 0)

    def rollback(self, claim: SpeculativeEntry) -> None:
        """The request failed: forget what it inserted and no other request vouches for. Idempotent."""
        holding, claim.holding = claim.holding, None
        if holding is None or self._known(claim.endpoint) is not holding:
            return
        path = self._tree.walk(claim.hashes)[0]
        if claim.flies:
            holding.land(path, claim.number)
        for run in reversed(path):
            vouching = holding.claims.get(run)
            if vouching is not None:
                vouching.discard(claim.number)
                if not vouching:
                    holding.drop(run)
            self._clean(run)

    def insert(self, endpoint: EndpointId, hashes: array[int]) -> None:
        """The endpoint is known to hold these blocks."""
        holding = self._holding(endpoint)
        if holding is not None and hashes:
            self._insert(holding, hashes)

    def contradict(self, endpoint: EndpointId, hashes: array[int], cached_blocks: int) -> int:
        """The engine had only the first `cached_blocks`: drop the rest and all that extends it. Returns blocks dropped.

        An engine evicts from the end, so what extends a missing block is missing too. Where the request itself was
        served, a `confirm` afterwards re-enters its own prompt.
        """
        holding = self._known(endpoint)
        run = self._run_at(hashes, cached_blocks)
        if holding is None or run is None or not run.mask & holding.mask:
            return 0
        before = holding.blocks
        first = self._path(hashes[:cached_blocks]) if cached_blocks else []
        start = self._run_at(hashes, cached_blocks)  # the cut may have split it
        assert start is not None
        assert start.parent is (first[-1] if first else None)
        for below in reversed(self._tree.subtree(start)):
            if below.mask & holding.mask:
                self._drop(holding, below)
        return before - holding.blocks

    def set_capacity(self, endpoint: EndpointId, blocks: int) -> None:
        """The engine's capacity as now known; what is over it is given up step by step, oldest first."""
        holding = self._holding(endpoint)
        if holding is not None:
            holding.capacity = max(0, blocks)
            self._step(holding)

    def clear(self, endpoint: EndpointId) -> None:
        """The engine lost its cache (a restart): it holds nothing from now on, its capacity stays."""
        capacity = self.capacity(endpoint)
        self.remove(endpoint)
        self.set_capacity(endpoint, capacity)

    def remove(self, endpoint: EndpointId) -> None:
        """The endpoint left. Its entries mean nothing at once and are swept step by step."""
        slot = self._slots.retire(endpoint)
        if slot is not None:
            holding = self._holdings[slot]
            holding.capacity = 0
            self._retired.append(holding)
            for run in holding.ground():
                self._clean_up(run)
            self.sweep(STEP_RUNS)

    def sweep(self, runs: int) -> bool:
        """Give up at most so many runs of endpoints that left; True when nothing is left to sweep."""
        while self._retired and runs > 0:
            runs -= self._evict(self._retired[0], runs)
            if not self._retired[0].blocks:
                holding = self._retired.popleft()
                del self._holdings[holding.slot]
                self._slots.release(holding.slot)
        return not self._retired

    # how

    def _known(self, endpoint: EndpointId) -> EndpointLru | None:
        slot = self._slots.get(endpoint)
        return None if slot is None else self._holdings[slot]

    def _holding(self, endpoint: EndpointId) -> EndpointLru | None:
        slot = self._slots.assign(endpoint)
        if slot is None:
            return None
        holding = self._holdings.get(slot)
        if holding is None:
            holding = self._holdings[slot] = EndpointLru(slot, self.default_capacity)
        return holding

    def _insert(self, holding: EndpointLru, hashes: array[int], *, landing: int = 0) -> None:
        path = self._path(hashes)
        if landing:
            holding.land(path, landing)
        for run in path:
            if not run.mask & holding.mask:
                holding.take(run)
            elif holding.claims:
                holding.claims.pop(run, None)
        while len(path) > 1 and self._mergeable(path[-2], path[-1], holding):
            leaf = path.pop()
            holding.merge(path[-1], leaf)
            self._tree.absorb(path[-1], leaf)
        holding.touch(path)
        self._step(holding)

    def _mergeable(self, run: Run, leaf: Run, holding: EndpointLru) -> bool:
        """Only this endpoint holds them and nothing else branches off: a chat that grew."""
        return (
            run.mask == leaf.mask == holding.mask
            and run in holding.stamps  # held already, not only promised
            and leaf.child is None
            and leaf.next is leaf.previous is None
            and run.flying == leaf.flying
            and not run.flying & ~holding.mask
            and holding.fly_alike(run, leaf)
        )

    def _path(self, hashes: array[int]) -> list[Run]:
        """Runs that cover exactly these hashes, split and grown as needed."""
        path, depth, partial, inside = self._tree.walk(hashes)
        if partial is not None:
            path.append(self._split(partial, inside))
            depth += inside
        if depth < len(hashes):
            path.append(self._tree.grow(path[-1] if path else None, hashes[depth:]))
        return path

    def _run_at(self, hashes: array[int], block: int) -> Run | None:
        """The run that contains `hashes[block]`."""
        path, depth, partial, inside = self._tree.walk(hashes[: block + 1])
        if block >= len(hashes):
            return None
        if partial is not None:
            return partial if depth + inside > block else None
        return path[-1] if path and depth > block else None

    def _split(self, run: Run, at: int) -> Run:
        head = self._tree.split(run, at)
        head.mask, head.flying = run.mask, run.flying
        for slot in slots_of(run.mask):
            self._holdings[slot].cover(head, run)
        for slot in slots_of(run.flying):
            flights = self._holdings[slot].flights
            flights[head] = set(flights[run])
        return head

    def _drop(self, holding: EndpointLru, run: Run) -> None:
        holding.drop(run)
        self._clean(run)

    def _clean(self, run: Run) -> None:
        """Forget a run that means nothing any more; nothing below it does either."""
        if not run.mask and not run.flying:
            self._tree.remove(run)

    def _clean_up(self, run: Run | None) -> None:
        """The same with what is above it, from the deepest on."""
        while run is not None and run.child is None and not run.mask and not run.flying and self._tree.has(run):
            self._tree.remove(run)
            run = run.parent

    def _step(self, holding: EndpointLru) -> None:
        if holding.blocks > holding.capacity:
            self._evict(holding, STEP_RUNS)
        if self._retired:
            self.sweep(STEP_RUNS)

    def _evict(self, holding: EndpointLru, runs: int) -> int:
        """Bring the holding down to its capacity in at most so many steps; returns the steps taken (at least one)."""
        steps = 0
        while steps < runs and (surplus := holding.blocks - holding.capacity) > 0:
            run = holding.oldest()
            steps += 1
            if len(run.hashes) <= surplus:
                self._drop(holding, run)
            elif run.mask == holding.mask and not run.flying:
                self._tree.cut(run, len(run.hashes) - surplus)
                holding.shorten(run, surplus)
            else:
                self._split(run, len(run.hashes) - surplus)
                self._drop(holding, run)
        return max(steps, 1)
