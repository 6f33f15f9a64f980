"""Encoding of the service's learned state, for the next start and for another process.

Saved are the approximate index, when each engine's process began, learned speeds, steps and prompt lengths, and where
sessions and stored responses were served. Left out are the precise index (engines replay their events), token memory
(token ids are the prompt), and heat (a few hundred requests teach it again). As bytes: head, contents (msgpack), the
indexes' hashes, checksum of all before it. Both ways go in small steps."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct

import msgspec
from xxhash import xxh3_64

from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.overlap.last_served import LastServed, Served
from kvproxy.cache.prefix.hashing import little_endian
from kvproxy.cache.state import CacheState
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routing.speeds import SpeedState
from kvproxy.operate.runtime.approximate_dump import IndexColumns, Restoration, dump, fingerprint

log = logging.getLogger("kvproxy.kvcache")

_MAGIC = b"kvpxwarm"
#: Of the layout and of what is hashed (how a request becomes a prompt): raise it when either changes.
VERSION = 3
_HEAD = Struct("<8sHxxxxxxQ")  # magic, version, bytes of the contents
_CHECKSUM = Struct("<Q")  # xxh3_64


class Outcome(StrEnum):
    """Outcome of a saved state at the start; a metric label."""

    RESTORED = "restored"
    NONE = "none"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    FOREIGN = "not_a_snapshot"
    OTHER_VERSION = "other_version"
    OTHER_HASHES = "other_hashes"
    CORRUPT = "corrupt"
    TOO_OLD = "too_old"
    OTHER_ENDPOINTS = "other_endpoints"
    IN_USE = "in_use"


class Unusable(Exception):
    """Why a saved state is not used."""

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
class Saved:
    """A saved state as it was read, with each cluster's hashes."""

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


def decode(data: bytes) -> Saved:
    """Raise Unusable for anything that this version did not write, whole and with the same hashes."""
    if len(data) < _HEAD.size + _CHECKSUM.size or not data.startswith(_MAGIC):
        raise Unusable(Outcome.FOREIGN)
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
    return Saved(kept, hashes, len(data))


def _divided(kept: Kept, hashes: memoryview) -> list[memoryview]:
    parts = []
    start = 0
    for cluster in kept.clusters:
        end = start + 8 * cluster.index.blocks
        parts.append(hashes[start:end])
        start = end
    return parts


#: Share of the file for where sessions and responses were served, over all clusters: one in so many bytes.
_SERVED_SHARE = 8
_HEAD_BYTES = 64  # head and checksum of the file
#: A wall clock may be set back by so much while the proxy is away.
_CLOCK_S = 60.0
_NOTHING = IndexColumns(b"", b"", [])
#: Entries of a table written, or read, per step.
_STEP = 128


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a restore."""

    blocks: int
    endpoints: int
    left_out: int  # endpoints that are gone, or are other engines now
    age_s: float


class Contents:
    """Reads and fills the state of these clusters."""

    def __init__(self, state: CacheState, *, clusters: Mapping[str, Cluster], clock: Clock, wall_clock: Clock) -> None:
        self._state = state
        self._clusters = clusters
        self._clock = clock
        self._wall_clock = wall_clock

    def continues(self, other: Contents) -> bool:
        """Return whether both are of one state: a reload's service goes on with that of the one before."""
        return self._state is other._state

    def take(self, max_bytes: int) -> Generator[None, None, list[bytes]]:
        """Yield a file's pieces, all but the checksum. The service goes on between the steps."""
        taken_at = self._wall_clock()
        kept = []
        for name, cluster in self._clusters.items():
            max_served = max_bytes // _SERVED_SHARE // len(self._clusters)
            last_served = self._state.indexes[name].last_served
            served = yield from dump_served(last_served, self._clock(), max_bytes=max_served)
            kept.append(self._cluster(name, cluster, served))
        whole = Kept(taken_at, fingerprint(), dict(self._state.bytes_per_token.learned), kept)
        left = max_bytes - _HEAD_BYTES - len(msgspec.msgpack.encode(whole))
        hashes: list[bytes] = []
        for number, one in enumerate(kept):
            share = left // (len(kept) - number)
            dumped = yield from dump(self._state.indexes[one.name].approximate, max_bytes=share)
            left -= dumped.bytes_used
            hashes += dumped.hashes
            kept[number] = msgspec.structs.replace(one, index=dumped.columns)
        return encode(whole, hashes)

    def put_back(self, saved: Saved, *, max_age_s: float) -> Generator[None, None, Returned]:
        """Raise Unusable when it is too old, damaged, or of other endpoints; then nothing has been changed."""
        kept = saved.kept
        away_s = self._wall_clock() - kept.taken_at
        if not -_CLOCK_S <= away_s <= max_age_s:
            raise Unusable(Outcome.TOO_OLD, f"{away_s:.0f} s old, of {max_age_s:.0f} s allowed")
        known = [one for one in kept.clusters if one.name in self._clusters]
        same = {one.name: _same(one, self._clusters[one.name]) for one in known}
        if not any(same.values()):
            raise Unusable(Outcome.OTHER_ENDPOINTS, "of endpoints that are not configured, or not at those addresses")
        restorations = self._restorations(saved)
        self._state.bytes_per_token.resume_from(kept.bytes_per_token)
        for one in known:
            _resume_ranks(self._clusters[one.name], same[one.name].values())
            yield from self._fill(one, restorations[one.name], same[one.name], kept.taken_at)
        count = sum(len(cluster.endpoints) for cluster in kept.clusters)
        stay = sum(map(len, same.values()))
        blocks = sum(self._state.indexes[one.name].approximate.counts.entries for one in known)
        return Returned(blocks, stay, count - stay, max(0.0, away_s))

    def _cluster(self, name: str, cluster: Cluster, served: TablesKept) -> ClusterKept:
        index = self._state.indexes[name]
        started_at = index.started_at
        rows = [
            EndpointKept(str(one.id), str(one.origin), started_at.get(one.id), str(one.engine.id), one.rank)
            for one in cluster.endpoints
        ]
        speeds = None if cluster.speeds is None else cluster.speeds.state(self._clock())
        return ClusterKept(name, rows, _NOTHING, speeds, index.steps.state(), served)

    def _restorations(self, saved: Saved) -> Mapping[str, Restoration]:
        try:
            return {
                cluster.name: Restoration(cluster.index, hashes)
                for cluster, hashes in zip(saved.kept.clusters, saved.hashes, strict=True)
            }
        except ValueError as error:
            raise Unusable(Outcome.CORRUPT, f"damaged: {error}") from error

    def _fill(
        self, kept: ClusterKept, restoration: Restoration, same: Mapping[str, EndpointKept], taken_at: float
    ) -> Iterator[None]:
        index = self._state.indexes[kept.name]
        cluster = self._clusters[kept.name]
        away_s = max(0.0, self._wall_clock() - taken_at)
        if kept.speeds is not None and cluster.speeds is not None:
            try:
                cluster.speeds.resume(kept.speeds, self._clock(), keep=same, away_s=away_s)
            except ValueError as error:
                log.info("[kvcache] learned speeds of cluster %s are not taken over: %s", kept.name, error)
        index.steps.resume(kept.steps, keep=same)
        yield from restoration.restore_into(index.approximate, keep=same)
        try:
            yield from restore_served(index.last_served, kept.served, self._clock() - away_s, keep=same)
        except msgspec.DecodeError as error:
            log.info("[kvcache] sessions of cluster %s are not all taken over: %s", kept.name, error)
        for name, one in same.items():
            # An engine whose start is not known is another process if it began after the state was saved.
            index.started_at[EndpointId(name)] = taken_at if one.started_at is None else one.started_at


def _same(kept: ClusterKept, cluster: Cluster) -> dict[str, EndpointKept]:
    """Endpoints that are still there, at the same address; data-parallel ranks of an engine that was not asked for
    them yet, too."""
    now = {str(one.id): str(one.origin) for one in cluster.endpoints}
    unasked = {str(one.id): str(one.origin) for one in cluster.engines if one.ranks.asks and not one.ranks.candidates}
    return {
        one.id: one
        for one in kept.endpoints
        if now.get(one.id) == one.address or (one.rank is not None and unasked.get(one.engine) == one.address)
    }


def _resume_ranks(cluster: Cluster, kept: Collection[EndpointKept]) -> None:
    for engine in cluster.engines:
        ranks = [one.rank for one in kept if one.engine == engine.id and one.rank is not None]
        if ranks:
            cluster.ranks.resume_ranks(engine, ranks)


def dump_served(tables: LastServed, now: float, *, max_bytes: int) -> Generator[None, None, TablesKept]:
    """Yield what of them still stands, a half of the bytes for each table at most."""
    entries = list(tables.entries())
    sessions = [(session, served) for session, _, served in reversed(entries) if session]
    responses = [(response, served) for _, response, served in reversed(entries) if response]
    kept = []
    for table in (sessions, responses):
        pieces = []
        left = max_bytes // 2
        for start in range(0, len(table), _STEP):
            rows = [_row(*one, now) for one in table[start : start + _STEP] if tables.stands(one[1], now)]
            piece = msgspec.msgpack.encode(rows)
            left -= len(piece)
            if left < 0:
                break
            pieces.append(piece)
            yield
        kept.append(pieces)
    return TablesKept(*kept)


def restore_served(tables: LastServed, kept: TablesKept, now: float, *, keep: Container[str]) -> Iterator[None]:
    """Into empty tables, of the endpoints in `keep`; `now` is when `kept` was new. Raises DecodeError for a piece that
    is none."""
    for pieces, is_session in ((kept.sessions, True), (kept.responses, False)):
        for piece in reversed(pieces):
            for row in reversed(_decode_rows(piece)):
                if row.endpoint in keep:
                    tables.adopt(row.name if is_session else 0, 0 if is_session else row.name, _served(row, now))
            yield


_decode_rows = msgspec.msgpack.Decoder(list[ServedKept]).decode


def _row(name: int, served: Served, now: float) -> ServedKept:
    keys, root = (little_endian(blocks).tobytes() for blocks in (served.keys, served.root))
    return ServedKept(name, served.endpoint, now - served.at, served.prompt_tokens, served.tokens, keys, root)


def _served(row: ServedKept, now: float) -> Served:
    keys, root = (little_endian(array("Q", blocks)) for blocks in (row.keys, row.root))
    return Served(EndpointId(row.endpoint), 0, now - row.age_s, row.prompt_tokens, row.tokens, keys, root)
