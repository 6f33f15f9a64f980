"""The approximate index as plain columns and back. Keeping them is the caller's business.

Both ways go path by path, so that the caller may do something else between two steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Generator, Iterator
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from kvproxy.base.types import EndpointId, Prompt, RequestKind
from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES, little_endian, root_seed, text_blocks
from kvproxy.cache.prefix.prompt_identity import prompt_identity

#: Hashes are handed out in pieces of about this size, so that no step copies all of them.
CHUNK_BYTES = 256 * 1024
_RUN_BYTES = 8  # parent and length
_PATH_BYTES = 4
_ENDPOINT_BYTES = 32


class EndpointPaths(msgspec.Struct, array_like=True, frozen=True):
    """Contents of one endpoint."""

    id: str
    capacity: int  # blocks
    paths: bytes  # u32: numbers of last runs, the most recently requested first


class IndexColumns(msgspec.Struct, array_like=True, frozen=True):
    """Runs by number, and each endpoint's paths. The runs' hashes (u64) stand beside it, one run after another."""

    parents: bytes  # i32: number of an earlier run, or -1
    lengths: bytes  # u32: blocks
    endpoints: list[EndpointPaths]

    @property
    def blocks(self) -> int:
        """Hashes of all runs."""
        return sum(_numbers("I", self.lengths))


@dataclass(frozen=True, slots=True)
class Dumped:
    """Columns, and the hashes in pieces (u64, little-endian)."""

    columns: IndexColumns
    hashes: list[bytes]
    bytes_used: int


#: A chat with parts that engines leave out or read alike.
_CHAT = (
    b'{"role":"system","content":"x-anthropic-billing-header: a;\\nb"}',
    b'{"role":"user","content":[{"type":"text","text":"%b","cache_control":{"type":"ephemeral"}}]}'
    % (2 * TEXT_BLOCK_BYTES * b"c"),
)


def fingerprint() -> int:
    """Change whenever the same prompt would get other hashes: block size, seeds, identity, canonical bytes, hash
    function."""
    seed = root_seed(block_size=TEXT_BLOCK_BYTES, model="model", lora="lora", cache_salt="salt")
    return text_blocks(prompt_identity(RequestKind.CHAT, Prompt(b"shape", _CHAT)), seed)[-1]


class _Writer:
    """Numbers runs so that a parent comes before its children, within a budget of bytes.

    A run is known by its last hash, which names its whole prefix: one that is split or grows between two steps is
    another run then, and what was written of it stays true.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.left = max_bytes
        self.parents = array("i")
        self.lengths = array("I")
        self.full: list[bytes] = []
        self.chunk = bytearray()
        self._number: dict[int, int] = {}

    def add(self, run: Run) -> int | None:
        """Return the run's number, its ancestors written before it; None when that does not fit."""
        path: list[Run] = []
        at: Run | None = run
        while at is not None and at.hashes[-1] not in self._number:
            path.append(at)
            at = at.parent
        cost = _PATH_BYTES + sum(_RUN_BYTES + 8 * len(each.hashes) for each in path)
        if cost > self.left:
            return None
        self.left -= cost
        number = -1 if at is None else self._number[at.hashes[-1]]
        for each in reversed(path):
            self._append(each, number)
            number = self._number[each.hashes[-1]] = len(self.parents) - 1
        return number

    def endpoint(self, endpoint: EndpointId) -> bool:
        """Reserve room for the endpoint's record; returns False if there is none."""
        cost = _ENDPOINT_BYTES + len(endpoint.encode())
        if cost > self.left:
            return False
        self.left -= cost
        return True

    def _append(self, run: Run, parent: int) -> None:
        self.parents.append(parent)
        self.lengths.append(len(run.hashes))
        self.chunk += little_endian(run.hashes).tobytes()
        if len(self.chunk) >= CHUNK_BYTES:
            self.full.append(bytes(self.chunk))
            self.chunk.clear()


def dump(index: ApproximateIndex, *, max_bytes: int) -> Generator[None, None, Dumped]:
    """Yield the index in at most this many bytes, a path a step; the least recently requested paths are left out first.

    The index may change between steps. Each path is as it is when its turn comes."""
    writer = _Writer(max_bytes)
    paths: dict[EndpointId, array[int]] = {}
    waiting: list[tuple[array[int], Iterator[Run | None]]] = []
    for endpoint in index.counts.endpoints:
        if writer.endpoint(endpoint):
            paths[endpoint] = array("I")
            waiting.append((paths[endpoint], index.counts.newest_first(endpoint)))
    while waiting:  # a path of each endpoint in turn, so that all are cut at a like age
        still = []
        for numbers, newest in waiting:
            if _write_next(writer, numbers, newest):
                still.append((numbers, newest))
            yield
        waiting = still
    rows = [EndpointPaths(each, index.counts.capacity(each), _bytes(numbers)) for each, numbers in paths.items()]
    columns = IndexColumns(_bytes(writer.parents), _bytes(writer.lengths), rows)
    return Dumped(columns, [*writer.full, bytes(writer.chunk)], writer.max_bytes - writer.left)


def _write_next(writer: _Writer, numbers: array[int], newest: Iterator[Run | None]) -> bool:
    """Write one step of one endpoint; False if it is complete, or nothing more fits."""
    try:
        run = next(newest)
    except StopIteration:
        return False
    if run is None:
        return True
    number = writer.add(run)
    if number is None:
        return False
    numbers.append(number)
    return True


class Restoration:
    """A dump to be put back. Raises ValueError for one that cannot be: then nothing has been changed."""

    def __init__(self, columns: IndexColumns, hashes: memoryview) -> None:
        self._parents = _numbers("i", columns.parents)
        self._ends = array("Q", accumulate(_numbers("I", columns.lengths)))
        self._hashes = hashes
        self._endpoints = [(one, _numbers("I", one.paths)) for one in columns.endpoints]
        self._check(columns)

    def restore_into(self, index: ApproximateIndex, *, keep: Container[str]) -> Iterator[None]:
        """Insert the paths of these endpoints, oldest first, under the capacities they had; a path a step."""
        for row, numbers in self._endpoints:
            if row.id in keep:
                endpoint = EndpointId(row.id)
                index.set_capacity(endpoint, row.capacity)
                for number in reversed(numbers):
                    index.insert(endpoint, index.locate(self._path(number)))
                    yield

    def _check(self, columns: IndexColumns) -> None:
        runs = len(self._parents)
        if len(self._ends) != runs or 8 * (self._ends[-1] if runs else 0) != len(self._hashes):
            raise ValueError("columns of different lengths")
        if 0 in _numbers("I", columns.lengths):
            raise ValueError("an empty run")
        if any(not -1 <= parent < number for number, parent in enumerate(self._parents)):
            raise ValueError("a run before its parent")
        for row, numbers in self._endpoints:
            if row.capacity < 0 or any(number >= runs for number in numbers):
                raise ValueError("an endpoint out of range")

    def _path(self, number: int) -> array[int]:
        parts = []
        while number >= 0:
            start = self._ends[number - 1] if number else 0
            parts.append(self._hashes[8 * start : 8 * self._ends[number]])
            number = self._parents[number]
        path = array("Q")
        for part in reversed(parts):
            path.frombytes(part)
        return little_endian(path)


def _bytes(numbers: array[int]) -> bytes:
    return little_endian(numbers).tobytes()


def _numbers(code: str, data: bytes) -> array[int]:
    """Raise ValueError when it is no whole number of items."""
    numbers = array(code)
    numbers.frombytes(data)
    return little_endian(numbers)
