from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvproxy.prefix.approximate import ApproximateIndex
from kvproxy.prefix.snapshot import RestoreOutcome, dump, restore
from tests.prefix.support import A, B, C, chained

PATHS = st.lists(st.tuples(st.sampled_from([A, B]), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=20)


def signed(payload: object, *, version: int = 1) -> bytes:
    body = msgspec.msgpack.encode(payload)
    return b"kvpxidx\n" + version.to_bytes(2, "little") + xxh3_64_intdigest(body).to_bytes(8, "little") + body


@given(PATHS, st.integers(4, 20))
def test_a_restart_knows_what_was_known(paths: list[tuple[str, list[int]]], capacity: int) -> None:
    """Same matches, same capacities, and the same order of eviction afterwards."""
    index, warm = ApproximateIndex(capacity_blocks=capacity), ApproximateIndex()
    for endpoint, path in paths:
        index.insert(endpoint, chained(path))
    assert restore(warm, dump(index)).blocks == index.entries
    for room in range(capacity, -1, -1):
        for endpoint in index.endpoints:
            assert warm.blocks(endpoint) == index.blocks(endpoint)
            index.set_capacity(endpoint, room)
            warm.set_capacity(endpoint, room)
        for _, path in paths:
            assert warm.lookup(chained(path)) == index.lookup(chained(path))


def test_speculative_entries_are_left_out() -> None:
    """A request in flight at the end of one life is not confirmed in the next."""
    index, warm = ApproximateIndex(), ApproximateIndex()
    index.insert(A, chained((1, 2)))
    index.route(A, chained((1, 2, 3)))
    index.route(A, chained((9,)))
    assert restore(warm, dump(index)).blocks == 2
    assert warm.lookup(chained((1, 2, 3))) == {A: 2}
    assert warm.lookup(chained((9,))) == {}


def test_the_most_recently_used_fits_first() -> None:
    """A bounded snapshot keeps what is likeliest to be asked for, of every endpoint."""
    index, warm = ApproximateIndex(), ApproximateIndex()
    for session in range(100):
        index.insert(A, chained((session, *range(20))))
        index.insert(B, chained((500 + session, *range(20))))
    data = dump(index, max_bytes=4_000)
    assert len(data) <= 4_000
    restored = restore(warm, data)
    assert restored.outcome is RestoreOutcome.RESTORED
    assert 0 < restored.blocks < index.entries
    assert warm.lookup(chained((99, *range(20)))) == {A: 21}
    assert warm.lookup(chained((599, *range(20)))) == {B: 21}
    assert warm.lookup(chained((0, *range(20)))) == {}


def test_no_room_even_for_the_endpoints() -> None:
    """A tiny bound gives a valid, empty snapshot."""
    index, warm = ApproximateIndex(), ApproximateIndex()
    index.insert(C, chained((1, 2)))
    restored = restore(warm, dump(index, max_bytes=40))
    assert (restored.outcome, restored.endpoints, restored.blocks) == (RestoreOutcome.RESTORED, 0, 0)


@pytest.mark.parametrize(
    ("data", "outcome"),
    [
        (b"", RestoreOutcome.NOT_A_SNAPSHOT),
        (b"kvpxidx\n", RestoreOutcome.NOT_A_SNAPSHOT),
        (b"SQLite format 3\0" + bytes(40), RestoreOutcome.NOT_A_SNAPSHOT),
        (signed([[], []], version=2), RestoreOutcome.OTHER_VERSION),
        (signed([[], []])[:-1] + b"x", RestoreOutcome.CORRUPT),
        (signed({"runs": 1}), RestoreOutcome.CORRUPT),
        (signed([[[0, bytes(8)]], []]), RestoreOutcome.CORRUPT),
        (signed([[[-2, bytes(8)]], []]), RestoreOutcome.CORRUPT),
        (signed([[[-1, b""]], []]), RestoreOutcome.CORRUPT),
        (signed([[[-1, bytes(7)]], []]), RestoreOutcome.CORRUPT),
        (signed([[[-1, bytes(8)]], [["a", 5, [1]]]]), RestoreOutcome.CORRUPT),
        (signed([[[-1, bytes(8)]], [["a", 5, [-1]]]]), RestoreOutcome.CORRUPT),
        (signed([[], [["a", -5, []]]]), RestoreOutcome.CORRUPT),
    ],
)
def test_bad_bytes_are_reported_and_change_nothing(data: bytes, outcome: RestoreOutcome) -> None:
    """Foreign, truncated, tampered with, or from another version: a warning for the caller, never an exception."""
    index = ApproximateIndex()
    assert restore(index, data).outcome is outcome
    assert (index.entries, index.endpoints) == (0, ())


@given(st.data())
def test_no_flipped_byte_passes(data: st.DataObject) -> None:
    """The checksum covers all that is not the head."""
    index = ApproximateIndex()
    index.insert(A, chained((1, 2, 3)))
    good = bytearray(dump(index))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    assert restore(ApproximateIndex(), bytes(good)).outcome is not RestoreOutcome.RESTORED
