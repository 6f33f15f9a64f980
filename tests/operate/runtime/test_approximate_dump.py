"""The approximate index as columns and back, step by step."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.operate.runtime import approximate_dump as snapshot
from kvproxy.operate.runtime.approximate_dump import (
    Dumped,
    EndpointPaths,
    IndexColumns,
    Restoration,
    dump,
    fingerprint,
)
from tests.cache.indexes.support import A, B, C, chained

T = TypeVar("T")
EVERYBODY = {A, B, C}
PATH = st.lists(st.integers(0, 2), min_size=1, max_size=6)
PATHS = st.lists(st.tuples(st.sampled_from([A, B]), PATH), max_size=20)
CHANGES = st.lists(st.tuples(st.sampled_from(["insert", "contradict", "shrink", "remove"]), PATH), max_size=30)


def finished(steps: Generator[None, None, T]) -> T:
    """Run the steps to the end and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def dumped(index: ApproximateIndex, max_bytes: int = 1 << 20) -> Dumped:
    return finished(dump(index, max_bytes=max_bytes))


def restored(data: Dumped, keep: set[str] | None = None) -> ApproximateIndex:
    """Return a new index of these endpoints' parts."""
    index = ApproximateIndex()
    restoration = Restoration(data.columns, memoryview(b"".join(data.hashes)))
    for _ in restoration.restore_into(index, keep=set(map(str, EVERYBODY)) if keep is None else keep):
        pass
    return index


@given(PATHS, st.integers(4, 20))
def test_a_restart_knows_what_was_known(paths: list[tuple[EndpointId, list[int]]], capacity: int) -> None:
    """Same matches, same capacities, and the same order of eviction afterwards."""
    index = ApproximateIndex(capacity_blocks=capacity)
    for endpoint, path in paths:
        index.insert(endpoint, index.locate(chained(path)))
    warm = restored(dumped(index))
    assert warm.counts.entries == index.counts.entries
    for room in range(capacity, -1, -1):
        for endpoint in index.counts.endpoints:
            assert warm.counts.held_blocks(endpoint) == index.counts.held_blocks(endpoint)
            index.set_capacity(endpoint, room)
            warm.set_capacity(endpoint, room)
        for _, path in paths:
            assert warm.lookup(warm.locate(chained(path))) == index.lookup(index.locate(chained(path)))


def change(index: ApproximateIndex, what: str, path: list[int]) -> None:
    """One thing that requests, engines and operators do to an index."""
    match what:
        case "insert":
            index.insert(A, index.locate(chained(path)))
        case "contradict":
            index.contradict(A, index.locate(chained(path)), len(path) // 2)
        case "shrink":
            index.set_capacity(A, len(path))
        case _:
            index.remove(B)


@given(PATHS, CHANGES, st.integers(1, 4))
def test_an_index_that_changes_meanwhile_is_kept_truly(
    paths: list[tuple[EndpointId, list[int]]], changes: list[tuple[str, list[int]]], every: int
) -> None:
    """Nothing comes back that was not known at some moment of the dump, and every block comes back under its prefix."""
    index = ApproximateIndex()
    for endpoint, path in paths:
        index.insert(endpoint, index.locate(chained(path)))
    ever = {(endpoint, depth) for endpoint, path in paths for depth in prefixes(path)}
    steps, waiting = dump(index, max_bytes=1 << 20), list(changes)

    def changing() -> Generator[None, None, Dumped]:
        while True:
            for _ in range(every):
                try:
                    next(steps)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]
            if waiting:
                what, path = waiting.pop()
                change(index, what, path)
                ever.update((A, depth) for depth in prefixes(path))
            yield

    warm = restored(finished(changing()))
    for path in [path for _, path in (*paths, *changes)]:
        for endpoint, depth in warm.lookup(warm.locate(chained(path))).items():
            assert (endpoint, tuple(path[:depth])) in ever
    for path in [path for _, path in (*paths, *changes)]:
        whole = chained(path)
        warm.insert(C, warm.locate(whole))  # a tree of wrong chains would not take it
        assert warm.lookup(warm.locate(whole))[C] == len(whole)


def prefixes(path: list[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(path[:depth]) for depth in range(1, len(path) + 1))


def test_a_run_that_grows_between_two_steps_is_written_anew() -> None:
    """A chat's next turn while it is being written must not leave a hole between old and new blocks."""
    index = ApproximateIndex()
    index.insert(A, index.locate(chained((1, 2))))
    index.insert(B, index.locate(chained((9,))))
    steps = dump(index, max_bytes=1 << 20)
    next(steps)  # a's path is written
    index.insert(A, index.locate(chained((1, 2, 3, 4))))
    assert index.counts.runs == 2  # the same run, only longer
    index.insert(B, index.locate(chained((1, 2, 3, 4, 5))))
    warm = restored(finished(steps))
    assert warm.lookup(warm.locate(chained((1, 2, 3, 4, 5)))) == {A: 2, B: 5}


def test_speculative_entries_are_left_out() -> None:
    """A request in flight at the end of one life is not confirmed in the next."""
    index = ApproximateIndex()
    index.insert(A, index.locate(chained((1, 2))))
    index.route(A, index.locate(chained((1, 2, 3))))
    index.route(A, index.locate(chained((9,))))
    warm = restored(dumped(index))
    assert warm.counts.entries == 2
    assert warm.lookup(warm.locate(chained((1, 2, 3)))) == {A: 2}
    assert warm.lookup(warm.locate(chained((9,)))) == {}


def test_the_most_recently_used_fits_first() -> None:
    """A bounded snapshot keeps what is likeliest to be asked for, of every endpoint."""
    index = ApproximateIndex()
    for session in range(100):
        index.insert(A, index.locate(chained((session, *range(20)))))
        index.insert(B, index.locate(chained((500 + session, *range(20)))))
    data = dumped(index, 4_000)
    assert sum(map(len, data.hashes)) < data.bytes_used <= 4_000
    warm = restored(data)
    assert 0 < warm.counts.entries < index.counts.entries
    assert warm.lookup(warm.locate(chained((99, *range(20))))) == {A: 21}
    assert warm.lookup(warm.locate(chained((599, *range(20))))) == {B: 21}
    assert warm.lookup(warm.locate(chained((0, *range(20))))) == {}


def test_no_room_even_for_the_endpoints() -> None:
    """A tiny bound gives a valid, empty snapshot."""
    index = ApproximateIndex()
    index.insert(C, index.locate(chained((1, 2))))
    data = dumped(index, 20)
    assert (data.columns.endpoints, data.bytes_used) == ([], 0)
    assert restored(data).counts.endpoints == ()


def test_endpoints_that_are_not_wanted_stay_away() -> None:
    """They were removed from the configuration meanwhile, or are other engines now."""
    index = ApproximateIndex()
    index.insert(A, index.locate(chained((1, 2))))
    index.insert(B, index.locate(chained((1, 2, 3))))
    warm = restored(dumped(index), keep={"b"})
    assert warm.lookup(warm.locate(chained((1, 2, 3)))) == {B: 3}
    assert warm.counts.endpoints == (B,)


def test_hashes_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no step has to copy tens of megabytes at once."""
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 64)
    index = ApproximateIndex()
    for session in range(10):
        index.insert(A, index.locate(chained((session, 1, 2, 3))))
    data = dumped(index)
    assert len(data.hashes) > 4
    assert restored(data).counts.entries == index.counts.entries


def columns(parents: list[int], lengths: list[int], endpoints: list[EndpointPaths] | None = None) -> IndexColumns:
    return IndexColumns(array("i", parents).tobytes(), array("I", lengths).tobytes(), endpoints or [])


def paths_of(endpoint: str, capacity: int, *numbers: int) -> EndpointPaths:
    return EndpointPaths(endpoint, capacity, array("I", numbers).tobytes())


@pytest.mark.parametrize(
    ("bad", "blocks"),
    [
        (columns([0], [1]), 1),
        (columns([-2], [1]), 1),
        (columns([-1, 1], [1, 1]), 2),
        (columns([-1], [0]), 0),
        (columns([-1], [1]), 2),
        (columns([-1], [2]), 1),
        (columns([-1, 0], [1]), 1),
        (columns([], []), 1),
        (columns([-1], [1], [paths_of("a", 5, 1)]), 1),
        (columns([-1], [1], [paths_of("a", -5)]), 1),
        (IndexColumns(b"\0\0\0", b"", []), 0),
        (IndexColumns(b"", b"", [EndpointPaths("a", 1, b"\0")]), 0),
    ],
)
def test_columns_that_cannot_be_are_refused(bad: IndexColumns, blocks: int) -> None:
    """Before anything is changed; the caller starts empty."""
    with pytest.raises(ValueError, match=r"."):
        Restoration(bad, memoryview(bytes(8 * blocks)))


def test_the_fingerprint_follows_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of another kind would match nothing, or the wrong thing."""
    assert fingerprint() == fingerprint()
    before = fingerprint()
    monkeypatch.setattr(snapshot, "TEXT_BLOCK_BYTES", 512)
    assert fingerprint() != before
