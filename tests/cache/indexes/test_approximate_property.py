"""The approximate index against a naive one, over random interleavings. Cursors are used long after they were made."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import takewhile
from math import exp

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.indexes.radix import PrefixCursor
from tests.cache.indexes.support import A, B, C, chained
from tests.support.examples import examples

Path = tuple[int, ...]
PATHS = st.lists(st.integers(0, 2), max_size=7).map(tuple)
ENDPOINTS = st.sampled_from([A, B, C])
START_CAPACITY = 12


def younger_blocks(index: ApproximateIndex, endpoint: EndpointId, hashes: array[int], block: int) -> int | None:
    """Return the blocks the endpoint was asked for since it was last asked for `hashes[block]`, to within a 16th of its
    capacity; None if it is not held."""
    lru = index._present.get(endpoint)
    run, _ = index._held.run_at(index.locate(hashes), block)
    if lru is None or run is None or run not in lru.stamps:
        return None
    return lru.ages.count_younger(lru.stamps[run])


class NaiveEndpoint:
    """Every block with the number of its last touch; claims beside."""

    def __init__(self) -> None:
        self.capacity = START_CAPACITY
        self.touched: dict[Path, int] = {}
        self.claims: dict[Path, set[int]] = {}
        self.flights: dict[int, Path] = {}  # by number of the claim; whatever becomes of the blocks

    def drop(self, block: Path) -> None:
        del self.touched[block]
        self.claims.pop(block, None)

    def evict(self) -> None:
        while len(self.touched) > self.capacity:
            self.drop(min(self.touched, key=lambda block: (self.touched[block], -len(block))))


def blocks_of(path: Path) -> list[Path]:
    return [path[: i + 1] for i in range(len(path))]


class ApproximateAgainstNaive(RuleBasedStateMachine):
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.index = ApproximateIndex(capacity_blocks=START_CAPACITY, max_endpoints=8)
        self.naive: dict[EndpointId, NaiveEndpoint] = {}
        self.time = 0
        self.seen: set[Path] = set()
        self.cursors: dict[Path, PrefixCursor[Run]] = {}
        self.requests = 0
        self.asked_for: dict[Path, list[int]] = {}  # requests of every block that any endpoint holds or will

    def cursor(self, path: Path) -> PrefixCursor[Run]:
        """Return the cursor made when this path was first or last located, whatever happened since."""
        return self.cursors.get(path) or self.locate(path)

    @rule(path=PATHS)
    def locate_again(self, path: Path) -> None:
        self.locate(path)

    def locate(self, path: Path) -> PrefixCursor[Run]:
        self.cursors[path] = self.index.locate(chained(path))
        return self.cursors[path]

    def at(self, endpoint: EndpointId) -> NaiveEndpoint:
        return self.naive.setdefault(endpoint, NaiveEndpoint())

    def touch(self, known: NaiveEndpoint, path: Path) -> None:
        self.time += 1
        self.seen.add(path)
        known.touched.update(dict.fromkeys(blocks_of(path), self.time))
        known.evict()

    @rule(target=claims, endpoint=ENDPOINTS, path=PATHS, in_flight=st.booleans())
    def route(self, endpoint: EndpointId, path: Path, in_flight: bool) -> object:
        cursor = self.cursor(path)
        if path and not cursor.counted:
            self.requests += 1
            for block in blocks_of(path):
                self.asked_for.setdefault(block, []).append(self.requests)
        claim = self.index.route(endpoint, cursor, in_flight=in_flight)
        known = self.at(endpoint)
        if in_flight:
            known.flights[claim.number] = path
        new = [block for block in blocks_of(path) if block not in known.touched]
        assert claim.new_blocks == len(new)
        for block in blocks_of(path):
            if block in new or block in known.claims:
                known.claims.setdefault(block, set()).add(claim.number)
        if path:
            self.touch(known, path)
        return claim, known, path

    @rule(claim=claims)
    def confirm(self, claim: tuple[SpeculativeEntry, NaiveEndpoint, Path]) -> None:
        made, known, path = claim
        settled = made.lru is None
        self.index.confirm(made)
        known.flights.pop(made.number, None)
        present = self.present()
        if not settled and self.naive.get(made.endpoint) is known:
            for block in blocks_of(path):
                if block not in present:
                    self.asked_for[block] = [self.requests]
            self.insert_naive(known, path)

    @rule(endpoint=ENDPOINTS, path=PATHS)
    def serve_three(self, endpoint: EndpointId, path: Path) -> None:
        """Enough to make it hot."""
        for _ in range(3):
            self.locate(path)
            self.confirm(claim=self.route(endpoint=endpoint, path=path, in_flight=False))

    @rule(claim=claims)
    def rollback(self, claim: tuple[SpeculativeEntry, NaiveEndpoint, Path]) -> None:
        made, known, path = claim
        settled = made.lru is None
        self.index.rollback(made)
        known.flights.pop(made.number, None)
        if settled or self.naive.get(made.endpoint) is not known:
            return
        for block in blocks_of(path):
            if block in known.claims:
                known.claims[block].discard(made.number)
                if not known.claims[block]:
                    known.drop(block)

    @rule(endpoint=ENDPOINTS, path=PATHS)
    def insert(self, endpoint: EndpointId, path: Path) -> None:
        self.index.insert(endpoint, self.cursor(path))
        self.insert_naive(self.at(endpoint), path)

    def insert_naive(self, known: NaiveEndpoint, path: Path) -> None:
        for block in blocks_of(path):
            known.claims.pop(block, None)
        if path:
            self.touch(known, path)

    @rule(endpoint=ENDPOINTS, path=PATHS, cached=st.integers(0, 7))
    def contradict(self, endpoint: EndpointId, path: Path, cached: int) -> None:
        dropped = self.index.contradict(endpoint, self.cursor(path), cached)
        known = self.naive.get(endpoint)
        gone = []
        if known is not None and cached < len(path):
            gone = [block for block in known.touched if block[: cached + 1] == path[: cached + 1]]
            for block in gone:
                known.drop(block)
        assert dropped == len(gone)

    @rule(endpoint=ENDPOINTS, capacity=st.integers(0, 20))
    def set_capacity(self, endpoint: EndpointId, capacity: int) -> None:
        self.index.set_capacity(endpoint, capacity)
        self.at(endpoint).capacity = capacity
        self.at(endpoint).evict()

    @rule(endpoint=ENDPOINTS)
    def clear(self, endpoint: EndpointId) -> None:
        self.index.clear(endpoint)
        old = self.naive.get(endpoint, NaiveEndpoint())
        self.naive[endpoint] = NaiveEndpoint()
        self.naive[endpoint].capacity = old.capacity

    @rule(endpoint=ENDPOINTS)
    def remove(self, endpoint: EndpointId) -> None:
        self.index.remove(endpoint)
        self.naive.pop(endpoint, None)

    @rule(target=claims)
    def nothing(self) -> object:
        return multiple()

    @rule(path=PATHS)
    def look(self, path: Path) -> None:
        assert self.index.lookup(self.cursor(path)) == self.expected(path)

    @rule(path=PATHS)
    def look_for_heat(self, path: Path) -> None:
        self.forget_cold()
        self.check_heat(path, self.cursor(path))

    @invariant()
    def same_heat(self) -> None:
        self.forget_cold()
        for path in self.seen:
            self.check_heat(path, self.index.locate(chained(path)))

    def forget_cold(self) -> None:
        """Forget blocks that no endpoint holds or has in flight."""
        present = self.present()
        self.asked_for = {block: asked for block, asked in self.asked_for.items() if block in present}

    def present(self) -> set[Path]:
        found: set[Path] = set()
        for known in self.naive.values():
            found.update(known.touched, *map(blocks_of, known.flights.values()))
        return found

    def check_heat(self, path: Path, cursor: PrefixCursor[Run]) -> None:
        """Hold heat between a count by block and the coldest prompt that went on from it: runs put together are as hot
        as their last block, and so is what is split off them."""
        threshold = 2.0

        def heat_of(block: Path) -> float:
            now = self.requests + (not cursor.counted)
            asked = (not cursor.counted) * (path[: len(block)] == block)
            return sum(exp((at - now) / 64) for at in self.asked_for.get(block, [])) + asked

        def coldest_from(block: Path) -> float:
            return min(heat_of(longer) for longer in (*self.seen, path) if longer[: len(block)] == block)

        most = sum(1 for _ in takewhile(lambda block: heat_of(block) >= threshold - 1e-6, blocks_of(path)))
        least = sum(1 for _ in takewhile(lambda block: coldest_from(block) >= threshold + 1e-6, blocks_of(path)))
        assert least <= self.index.hot_blocks(cursor) <= most

    @invariant()
    def same_blocks(self) -> None:
        assert self.index.counts.entries == sum(len(known.touched) for known in self.naive.values())
        for path in self.seen:
            assert self.index.lookup(self.index.locate(chained(path))) == self.expected(path)
            assert self.index.lookup_in_flight(self.index.locate(chained(path))) == self.in_flight(path)
        promises = [
            {block for path in known.flights.values() for block in blocks_of(path)} for known in self.naive.values()
        ]
        assert self.index.counts.in_flight_entries == sum(map(len, promises))
        assert self.index.counts.unique_blocks == sum(len(run.hashes) for run in self.index.counts.all_runs())
        for endpoint, known in self.naive.items():
            assert self.index.counts.held_blocks(endpoint) == len(known.touched) <= known.capacity
            self.check_recency(endpoint, known)

    def check_recency(self, endpoint: EndpointId, known: NaiveEndpoint) -> None:
        for path in self.seen:
            for at, block in enumerate(blocks_of(path)):
                found = younger_blocks(self.index, endpoint, chained(path), at)
                if block not in known.touched:
                    assert found is None
                    continue
                touches = list(known.touched.values())
                younger, alike = (sum(map(which, touches)) for which in self.than(known.touched[block]))
                assert found is not None
                assert younger <= found <= younger + alike // 2

    @staticmethod
    def than(touch: int) -> tuple[Callable[[int], bool], Callable[[int], bool]]:
        """Touched later, and at the same time; with a capacity this small every touch is a generation of its own."""
        return touch.__lt__, touch.__eq__

    def in_flight(self, path: Path) -> dict[EndpointId, int]:
        found = {}
        for endpoint, known in self.naive.items():
            flying = {block for flight in known.flights.values() for block in blocks_of(flight)}
            depth = len([*takewhile(flying.__contains__, blocks_of(path))])
            if depth:
                found[endpoint] = depth
        return found

    def expected(self, path: Path) -> dict[EndpointId, int]:
        found = {}
        for endpoint, known in self.naive.items():
            depth = 0
            while depth < len(path) and path[: depth + 1] in known.touched:
                depth += 1
            if depth:
                found[endpoint] = depth
        return found


ApproximateAgainstNaive.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
test_the_index_agrees_with_a_naive_one = ApproximateAgainstNaive.TestCase


def test_empty_hashes_match_nobody() -> None:
    """A prompt without a full block leaves no trace."""
    index = ApproximateIndex()
    nothing = index.locate(array("Q"))
    index.confirm(index.route(A, nothing))
    index.insert(A, nothing)
    assert (index.lookup(nothing), index.counts.entries) == ({}, 0)


def test_a_promise_outlives_what_is_believed() -> None:
    """Contradicted, or evicted for want of room: what is under way will be there all the same."""
    index = ApproximateIndex(capacity_blocks=4)
    first, second = (
        index.route(A, index.locate(chained((1, 2, 3))), in_flight=True),
        index.route(A, index.locate(chained((1, 2, 3))), in_flight=True),
    )
    index.contradict(A, index.locate(chained((1, 2, 3))), 1)
    index.insert(A, index.locate(chained((2, 2, 2, 2))))
    assert index.lookup(index.locate(chained((1, 2, 3)))) == {}
    assert index.lookup_in_flight(index.locate(chained((1, 2, 3)))) == {A: 3}
    index.rollback(first)
    assert index.lookup_in_flight(index.locate(chained((1, 2, 3)))) == {A: 3}
    index.rollback(second)
    assert index.lookup_in_flight(index.locate(chained((1, 2, 3)))) == {}
    assert index.counts.runs == 1
