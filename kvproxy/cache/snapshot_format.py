"""What is kept over a restart, as bytes and back.

Kept are the approximate index, when each engine's process began, learned speeds, steps and prompt lengths, and where
sessions and stored responses were served. Left out are the precise index (engines replay their events), token memory
(token ids are the prompt), and heat (a few hundred requests teach it again). As bytes: head, contents (msgpack), the
indexes' hashes, checksum of all before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct

import msgspec
from xxhash import xxh3_64

from kvproxy.cache.indexes.approximate_snapshot import IndexColumns, fingerprint
from kvproxy.cluster.routing.speeds import SpeedState

_MAGIC = b"kvpxwarm"
#: Of the layout and of what is hashed (how a request becomes a prompt): raise it when either changes.
VERSION = 3
_HEAD = Struct("<8sHxxxxxxQ")  # magic, version, bytes of the contents
_CHECKSUM = Struct("<Q")  # xxh3_64


class Outcome(StrEnum):
    """What became of a snapshot at the start; a metric label."""

    RESTORED = "restored"
    NONE = "none"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NOT_A_SNAPSHOT = "not_a_snapshot"
    OTHER_VERSION = "other_version"
    OTHER_HASHES = "other_hashes"
    CORRUPT = "corrupt"
    TOO_OLD = "too_old"
    OTHER_ENDPOINTS = "other_endpoints"


class Unusable(Exception):
    """Why a snapshot is not used."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(detail or outcome.value.replace("_", " "))
        self.outcome = outcome


class EndpointKept(msgspec.Struct, array_like=True, frozen=True):
    """An endpoint the index speaks of."""

    id: str
    address: str  # another address under the same id is another engine
    started_at: float | None  # of its process, by its own clock; None: it does not say
    engine: str = ""  # of a data-parallel rank: its engine
    rank: int | None = None


class ServedKept(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a session or a stored response was served last."""

    name: int
    endpoint: str
    age_s: float
    prompt_tokens: int
    tokens: int
    keys: bytes  # u64, little-endian
    root: bytes


class TablesKept(msgspec.Struct, array_like=True, frozen=True):
    """Sessions and responses in pieces (msgpack, of several each), those used last first."""

    sessions: list[bytes] = []
    responses: list[bytes] = []


class ClusterKept(msgspec.Struct, array_like=True, frozen=True):
    """One cluster."""

    name: str
    endpoints: list[EndpointKept]
    index: IndexColumns
    speeds: SpeedState | None
    steps: dict[str, tuple[int, int]] = {}  # in which engines reuse: learned, told
    served: TablesKept = TablesKept()


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """Everything but the hashes."""

    taken_at: float  # wall clock, seconds since the epoch
    hashing: int
    bytes_per_token: dict[str, float]
    clusters: list[ClusterKept]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was kept, with each cluster's hashes."""

    kept: Kept
    hashes: Sequence[memoryview]
    size_bytes: int


_decoder = msgspec.msgpack.Decoder(Kept)


def encode(kept: Kept, hashes: Iterable[bytes]) -> list[bytes]:
    """Return the file in pieces, all but its checksum. `hashes` are the clusters' one after another."""
    contents = msgspec.msgpack.encode(kept)
    return [_HEAD.pack(_MAGIC, VERSION, len(contents)) + contents, *hashes]


def pack_checksum(seen: xxh3_64) -> bytes:
    """Return the last piece of the file, over all pieces before it."""
    return _CHECKSUM.pack(seen.intdigest())


def decode(data: bytes) -> Snapshot:
    """Raise Unusable for anything that this version did not write, whole and with the same hashes."""
    if len(data) < _HEAD.size + _CHECKSUM.size or not data.startswith(_MAGIC):
        raise Unusable(Outcome.NOT_A_SNAPSHOT)
    _, version, contents_bytes = _HEAD.unpack_from(data)
    if version != VERSION:
        raise Unusable(Outcome.OTHER_VERSION, f"of version {version}, not {VERSION}")
    body = memoryview(data)[: -_CHECKSUM.size]
    if pack_checksum(xxh3_64(body)) != data[-_CHECKSUM.size :]:
        raise Unusable(Outcome.CORRUPT, "damaged or cut short")
    try:
        kept = _decoder.decode(body[_HEAD.size : _HEAD.size + contents_bytes])
        hashes = _divided(kept, body[_HEAD.size + contents_bytes :])
    except (msgspec.DecodeError, ValueError) as error:
        raise Unusable(Outcome.CORRUPT, f"damaged: {error}") from error
    if kept.hashing != fingerprint():
        raise Unusable(Outcome.OTHER_HASHES, "prompts were hashed another way")
    return Snapshot(kept, hashes, len(data))


def _divided(kept: Kept, hashes: memoryview) -> list[memoryview]:
    parts = []
    start = 0
    for cluster in kept.clusters:
        end = start + 8 * cluster.index.blocks
        parts.append(hashes[start:end])
        start = end
    return parts
