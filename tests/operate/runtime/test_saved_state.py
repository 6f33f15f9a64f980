"""A snapshot as bytes: whole, of this version, with the same hashes, or not used."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64

from kvproxy.operate.runtime.approximate_dump import EndpointPaths, IndexColumns, fingerprint
from kvproxy.operate.runtime.saved_state import (
    VERSION,
    ClusterKept,
    EndpointKept,
    Kept,
    Outcome,
    Unusable,
    decode,
    encode,
    pack_checksum,
)


def columns(*lengths: int) -> IndexColumns:
    """Run of these lengths, each at a root."""
    runs = array("I", lengths)
    return IndexColumns(array("i", [-1] * len(runs)).tobytes(), runs.tobytes(), [EndpointPaths("a", 9, b"")])


def cluster(name: str, index: IndexColumns) -> ClusterKept:
    return ClusterKept(name, [EndpointKept("a", "http://127.0.0.1:1", 5.0)], index, None)


def whole(kept: Kept | None = None, *hashes: bytes) -> bytes:
    """Return a file."""
    return signed(b"".join(encode(kept or Kept(7.0, fingerprint(), {"m": 4.0}, []), hashes)))


def signed(body: bytes) -> bytes:
    """With a checksum that fits."""
    return body + pack_checksum(xxh3_64(body))


def outcome_of(data: bytes) -> Outcome:
    with pytest.raises(Unusable) as caught:
        decode(data)
    return caught.value.outcome


def test_written_entries_are_read_back() -> None:
    """Each cluster with its own hashes."""
    kept = Kept(7.0, fingerprint(), {"m": 4.0}, [cluster("one", columns(2, 1)), cluster("two", columns(1))])
    data = whole(kept, b"a" * 16, b"b" * 8, b"c" * 8)
    snapshot = decode(data)
    assert snapshot.kept == kept
    assert [bytes(one) for one in snapshot.hashes] == [b"a" * 16 + b"b" * 8, b"c" * 8]
    assert snapshot.size_bytes == len(data)


@pytest.mark.parametrize(
    ("data", "outcome"),
    [
        (b"", Outcome.FOREIGN),
        (b"kvpxwarm", Outcome.FOREIGN),
        (b"SQLite format 3\0" + bytes(40), Outcome.FOREIGN),
        (whole()[:8] + (VERSION + 1).to_bytes(2, "little") + whole()[10:], Outcome.OTHER_VERSION),
        (whole()[:-1], Outcome.CORRUPT),
        (whole()[:-9], Outcome.CORRUPT),
        (whole() + b"x", Outcome.CORRUPT),
        (signed(whole()[:24] + b"\xc1"), Outcome.CORRUPT),
        (signed(whole()[:16] + (1 << 60).to_bytes(8, "little") + b"\x91"), Outcome.CORRUPT),
        (whole(Kept(7.0, fingerprint(), {}, [cluster("one", IndexColumns(b"", b"\0", []))])), Outcome.CORRUPT),
        (whole(Kept(7.0, fingerprint() ^ 1, {}, [])), Outcome.OTHER_HASHES),
    ],
)
def test_why_a_file_is_not_used(data: bytes, outcome: Outcome) -> None:
    """Foreign, cut short, tampered with, of another version, or of other hashes."""
    assert outcome_of(data) is outcome


@given(st.data())
def test_no_flipped_byte_passes(data: st.DataObject) -> None:
    """The checksum covers all that comes before it."""
    good = bytearray(whole(Kept(7.0, fingerprint(), {"m": 4.0}, [cluster("one", columns(3))]), bytes(24)))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Unusable):
        decode(bytes(good))


def test_the_version_is_raised_with_the_layout() -> None:
    """A file of today's version can be read for as long as the version stays: this one was written by version 3."""
    index = [b"\xff\xff\xff\xff", b"\x01\0\0\0", [["a", 9, b"\0\0\0\0"]]]
    speeds = [[0.1, 0.2, 0.3], [1.0] * 3, [1.0] * 9, [1.0] * 3, {"": {"host": [0.1, 9.0]}}, 4, {"a": [0.5, 3, 2.0]}]
    kept = [7.0, fingerprint(), {"m": 4.0}, [["one", [["a", "http://127.0.0.1:1", None]], index, speeds]]]
    contents = msgspec.msgpack.encode(kept)
    head = b"kvpxwarm" + (3).to_bytes(2, "little") + bytes(6) + len(contents).to_bytes(8, "little")
    snapshot = decode(signed(head + contents + bytes(8)))
    assert snapshot.kept.clusters[0].index.blocks == 1
    assert snapshot.kept.clusters[0].speeds is not None
    assert VERSION == 3
