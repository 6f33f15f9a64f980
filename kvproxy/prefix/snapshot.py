"""The approximate index as bytes and back, for a warm restart. Who keeps the bytes is the caller's business."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.prefix.approximate import ApproximateIndex
from kvproxy.prefix.hashing import little_endian
from kvproxy.prefix.holding import Run
from kvproxy.types import EndpointId

_MAGIC = b"kvpxidx\n"
#: Of the layout and of what the hashes mean: raise it when either changes.
VERSION = 1
_HEAD = Struct("<8sHQ")  # magic, version, xxh3_64 of the rest
_RUN_BYTES = 16  # upper bound of a run's framing


class RestoreOutcome(StrEnum):
    """What became of a snapshot; a metric label."""

    RESTORED = "restored"
    NOT_A_SNAPSHOT = "not_a_snapshot"
    OTHER_VERSION = "other_version"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Restored:
    """Nothing was changed unless the outcome is RESTORED."""

    outcome: RestoreOutcome
    endpoints: int = 0
    blocks: int = 0


class _RunRecord(msgspec.Struct, array_like=True):
    parent: int  # index of an earlier run, or -1
    hashes: bytes  # u64 little-endian


class _EndpointRecord(msgspec.Struct, array_like=True):
    id: str
    capacity: int
    paths: list[int]  # last runs, least recently used first


class _Snapshot(msgspec.Struct, array_like=True):
    runs: list[_RunRecord]
    endpoints: list[_EndpointRecord]


class _Writer:
    """Numbers runs so that a parent comes before its children, within a budget of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.runs: list[_RunRecord] = []
        self._left = max_bytes - _HEAD.size - _RUN_BYTES
        self._number: dict[Run, int] = {}

    def add(self, run: Run) -> int | None:
        """The run's number, its ancestors written before it; None when that does not fit."""
        path: list[Run] = []
        at: Run | None = run
        while at is not None and at not in self._number:
            path.append(at)
            at = at.parent
        cost = 5 + sum(_RUN_BYTES + 8 * len(each.hashes) for each in path)
        if cost > self._left:
            return None
        self._left -= cost
        number = -1 if at is None else self._number[at]
        for each in reversed(path):
            self.runs.append(_RunRecord(number, little_endian(each.hashes).tobytes()))
            number = self._number[each] = len(self.runs) - 1
        return number

    def endpoint(self, endpoint: EndpointId, capacity: int) -> _EndpointRecord | None:
        """An empty record of the endpoint; None when that does not fit."""
        cost = len(endpoint.encode()) + 2 * _RUN_BYTES
        if cost > self._left:
            return None
        self._left -= cost
        return _EndpointRecord(endpoint, capacity, [])


def dump(index: ApproximateIndex, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
    """The index in at most so many bytes; what was least recently used is left out first."""
    writer = _Writer(max_bytes)
    waiting: list[tuple[_EndpointRecord, Iterator[Run]]] = []
    for endpoint in index.endpoints:
        record = writer.endpoint(endpoint, index.capacity(endpoint))
        if record is not None:
            waiting.append((record, reversed(index.recency(endpoint))))
    records = [record for record, _ in waiting]
    while waiting:  # a path of each endpoint in turn, so that all are cut at a like age
        waiting = [(record, newest) for record, newest in waiting if _write_next(writer, record, newest)]
    for record in records:
        record.paths.reverse()
    payload = msgspec.msgpack.encode(_Snapshot(writer.runs, records))
    return _HEAD.pack(_MAGIC, VERSION, xxh3_64_intdigest(payload)) + payload


def restore(index: ApproximateIndex, data: bytes) -> Restored:
    """Insert a snapshot's paths, oldest first, with the capacities they were kept under. Never raises for bad bytes."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        return Restored(RestoreOutcome.NOT_A_SNAPSHOT)
    _, version, checksum = _HEAD.unpack_from(data)
    if version != VERSION:
        return Restored(RestoreOutcome.OTHER_VERSION)
    payload = memoryview(data)[_HEAD.size :]
    if xxh3_64_intdigest(payload) != checksum:
        return Restored(RestoreOutcome.CORRUPT)
    try:
        snapshot = msgspec.msgpack.decode(payload, type=_Snapshot)
        runs = [_hashes(snapshot, number) for number in range(len(snapshot.runs))]
        _check_paths(snapshot)
    except (msgspec.DecodeError, ValueError):
        return Restored(RestoreOutcome.CORRUPT)
    before = index.entries
    for record in snapshot.endpoints:
        endpoint = EndpointId(record.id)
        index.set_capacity(endpoint, record.capacity)
        for number in record.paths:
            index.insert(endpoint, _path(snapshot, runs, number))
    return Restored(RestoreOutcome.RESTORED, len(snapshot.endpoints), max(0, index.entries - before))


def _write_next(writer: _Writer, record: _EndpointRecord, newest: Iterator[Run]) -> bool:
    run = next(newest, None)
    number = None if run is None else writer.add(run)
    if number is not None:
        record.paths.append(number)
    return number is not None


def _hashes(snapshot: _Snapshot, number: int) -> array[int]:
    """The run's hashes; raises ValueError for a run that cannot be."""
    record = snapshot.runs[number]
    if not -1 <= record.parent < number or not record.hashes:
        raise ValueError("run out of order")
    hashes = array("Q")
    hashes.frombytes(record.hashes)
    return little_endian(hashes)


def _check_paths(snapshot: _Snapshot) -> None:
    for record in snapshot.endpoints:
        if record.capacity < 0 or any(not 0 <= number < len(snapshot.runs) for number in record.paths):
            raise ValueError("endpoint out of range")


def _path(snapshot: _Snapshot, runs: list[array[int]], number: int) -> array[int]:
    parts = []
    while number >= 0:
        parts.append(runs[number])
        number = snapshot.runs[number].parent
    return array("Q", b"".join(part.tobytes() for part in reversed(parts)))
