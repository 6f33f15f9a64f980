"""State of a proxy for a new one: a snapshot as for a warm restart, and the rest as deltas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import msgspec
from xxhash import xxh3_64

from kvproxy.base.background_task import TaskSet, run_in_slices
from kvproxy.base.types import Clock
from kvproxy.cache.service import KvCache
from kvproxy.cache.store import Action, ActionKind, ActionLocks
from kvproxy.cluster.cluster import Cluster
from kvproxy.features.exchange import deltas
from kvproxy.features.exchange.bounded_queue import BoundedQueue
from kvproxy.features.exchange.deltas import Delta
from kvproxy.features.exchange.journal import Journal, acted, session_served, size_of
from kvproxy.features.exchange.peer import Peer
from kvproxy.features.exchange.peer_applier import PeerApplier
from kvproxy.features.exchange.peers import Peers
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.stores import MAX_RECALLED_BYTES, RedisLink
from kvproxy.features.exchange.wire import MAX_DELTAS, Origin, StateChunk, decode_deltas, encode_deltas
from kvproxy.operate.runtime.saved_state import Contents, Unusable, decode, pack_checksum

#: Hashes and paths of the approximate indexes; the rest of a large one is learned anew.
MAX_BYTES = 32 * 1024 * 1024
_PIECE_BYTES = 48 * 1024
#: State that outlives all proxies: its bound, its time to live, the interval of writes by one of them, the time after
#: which another one writes, and the interval of reads at the start.
MAX_KEPT_BYTES = 2 * 1024 * 1024
KEPT_S = 600.0
KEEP_EVERY_S = 10.0
_KEEPER_S = 30.0
RECALL_S = 0.2
_KEPT = deltas.SessionServed, deltas.Spent
#: One step holds the event loop no longer, and pieces go out with this pause: a worker's socket holds a few.
SLICE_S = 0.003
_PIECE_S = 0.001

log = logging.getLogger("kvproxy.sync")

T = TypeVar("T")


def take_pieces(
    origin: Origin,
    world: SharedState,
    kvcache: KvCache | None,
    clusters: Mapping[str, Cluster],
    *,
    clock: Clock,
    wall_clock: Clock,
) -> Generator[None, None, list[StateChunk]]:
    """In messages, in the order to send them. The proxy goes on between the steps."""
    data = bytearray()
    if kvcache is not None:
        contents = Contents(kvcache.state, clusters=clusters, clock=clock, wall_clock=wall_clock)
        checksum = xxh3_64()
        for part in (yield from contents.take(MAX_BYTES)):
            checksum.update(part)
            data += part
        data += pack_checksum(checksum)
    parts = [bytes(data[at : at + _PIECE_BYTES]) for at in range(0, len(data), _PIECE_BYTES)]
    pieces = [StateChunk(origin, number, part, [], True) for number, part in enumerate(parts)]
    known = list[Delta]()
    room = _PIECE_BYTES
    for delta in _deltas(world, clock()):
        if known and (len(known) == MAX_DELTAS or size_of(delta) > room):
            pieces.append(StateChunk(origin, len(pieces), b"", known, True))
            known = []
            room = _PIECE_BYTES
            yield
        known.append(delta)
        room -= size_of(delta)
    pieces.append(StateChunk(origin, len(pieces), b"", known, False))
    return pieces


def put_pieces(
    data: bytes,
    rest: Sequence[Delta],
    heard: PeerApplier,
    kvcache: KvCache | None,
    clusters: Mapping[str, Cluster],
    *,
    clock: Clock,
) -> Generator[None, None, None]:
    """Yield what came of them. Raises Unusable for a snapshot that is none of ours; then nothing has been changed."""
    if data and kvcache is not None:
        snapshot = decode(data)
        taken_at = snapshot.kept.taken_at  # by the peer's clock: it was taken just now
        contents = Contents(kvcache.state, clusters=clusters, clock=clock, wall_clock=lambda: taken_at)
        yield from contents.put_back(snapshot, max_age_s=0.0)
    for at in range(0, len(rest), 50):
        heard.apply(rest[at : at + 50], clock())
        yield


def _deltas(world: SharedState, now: float) -> Iterator[Delta]:
    for name, part in world.clusters.items():
        if part.indexes is not None:
            for session, response, served in list(part.indexes.last_served.entries()):
                yield session_served(name, session, response, served, now)
        for endpoint, draining in part.drained().items():
            if draining:
                yield deltas.Drained(name, str(endpoint), draining)
    for limit, table in world.limits.items():
        yield from _spent(limit, table.missing(now))
    if world.store is not None:
        for (instance, _), pin in world.store.list_pins(now).items():
            yield acted(Action(ActionKind.PIN, instance, pin.prefix, "pinned"), now - pin.pinned_at)


def take_kept(world: SharedState, now: float) -> Generator[None, None, bytes]:
    """Of that what no proxy could learn again: what limits charged, and where sessions are, the latest."""
    kept: BoundedQueue[Delta] = BoundedQueue(MAX_KEPT_BYTES)
    for number, delta in enumerate(_deltas(world, now)):
        if isinstance(delta, _KEPT):
            kept.append(delta, size_of(delta))
        if number % 100 == 99:
            yield
    return encode_deltas(list(kept))


def _spent(limit: str, missing: Iterator[tuple[str, str, float]]) -> Iterator[Delta]:
    return (deltas.Spent(limit, key, kind, amount, at_least=True) for key, kind, amount in list(missing))


class Handover:
    """Handover of this proxy's state to a new one, and of another's state to this one."""

    def __init__(self, peers: Peers, tasks: TaskSet, *, journal: Journal, clock: Clock, wall_clock: Clock) -> None:
        self._peers = peers
        self._tasks = tasks
        self._clock = clock
        self._wall_clock = wall_clock
        self._kept = PeerApplier(Origin("store", 0, 0), lambda: self._world, journal)
        self._given: set[Origin] = set()  # at present
        self.follow(SharedState({}), None, {})

    def follow(self, world: SharedState, kvcache: KvCache | None, clusters: Mapping[str, Cluster]) -> None:
        """Set the objects to hand over."""
        self._world = world
        self._kvcache = kvcache
        self._clusters = clusters

    def give(self, peer: Origin) -> None:
        """All of it, a piece at a time."""
        if peer not in self._given:
            self._tasks.start(self._give(peer), name="sync snapshot")

    def take(self, peer: Peer, data: bytes, rest: Sequence[Delta]) -> None:
        """As of ReceiveSnapshot."""
        self._tasks.start(self._take(peer, data, rest), name="sync join")

    async def keep_in(self, store: RedisLink, claims: ActionLocks) -> NoReturn:
        """Keep the state that would be lost with all proxies: read it if no peer can send it, and then write it from
        one of them."""
        known = failed = False
        pause_s = RECALL_S
        while True:
            await asyncio.sleep(KEEP_EVERY_S if known else pause_s)
            if store.client is None or not store.connected or self._peers.newcomer.running:
                continue
            try:
                if not known and not self._peers.newcomer.told:
                    await self._recall(store)
                known = True
                if await claims.claim("keep", _KEEPER_S):
                    await store.keep(await self._in_slices(take_kept(self._world, self._clock())), KEPT_S)
                failed = False
            except Exception as error:  # noqa: BLE001 - any error of a library: it is tried again
                if not failed:
                    log.warning("%s keeps no state for a restart (%s)", store.where, type(error).__name__)
                known = known or isinstance(error, msgspec.DecodeError)
                failed = True
                pause_s = min(KEEP_EVERY_S, 2 * pause_s)

    async def _recall(self, store: RedisLink) -> None:
        data, age_s = await store.recall(KEPT_S)
        if len(data) > MAX_RECALLED_BYTES:
            raise msgspec.DecodeError("longer than anything that is kept")
        said = decode_deltas(data) if data else []
        for at in range(0, len(said), 50):
            self._kept.apply(said[at : at + 50], self._clock() - age_s)
            await asyncio.sleep(0)
        log.info("the store kept %d things, for %.0f s", len(said), age_s)

    async def _in_slices(self, steps: Generator[None, None, T]) -> T:
        return await run_in_slices(steps, slice_s=SLICE_S, clock=self._clock)

    async def _give(self, peer: Origin) -> None:
        self._given.add(peer)
        times = {"clock": self._clock, "wall_clock": self._wall_clock}
        try:
            steps = take_pieces(self._peers.origin, self._world, self._kvcache, self._clusters, **times)
            for piece in await self._in_slices(steps):
                self._peers.send_to(peer, piece)
                await asyncio.sleep(_PIECE_S)
        finally:
            self._given.discard(peer)

    async def _take(self, peer: Peer, data: bytes, rest: Sequence[Delta]) -> None:
        told = False
        try:
            steps = put_pieces(data, rest, peer.heard, self._kvcache, self._clusters, clock=self._clock)
            await self._in_slices(steps)
            told = True
            log.info("joined: %d bytes of index and %d other things from %s", len(data), len(rest), peer.origin)
        except Unusable as error:
            log.warning("the index of %s is not taken over: %s", peer.origin, error)
        finally:
            self._peers.newcomer.end(self._clock(), told=told)
