"""All that a proxy knows, for one that is new: a snapshot as a warm restart has it, and the rest as deltas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence

from xxhash import xxh3_64

from kvproxy.background_task import TaskSet, run_in_slices
from kvproxy.cluster.cluster import Cluster
from kvproxy.kvcache.actions.strategies import Action
from kvproxy.kvcache.providers import ActionKind
from kvproxy.kvcache.service import KvCache
from kvproxy.kvcache.snapshot.contents import Contents
from kvproxy.kvcache.snapshot.file_format import Unusable, decode, pack_checksum
from kvproxy.sync import deltas
from kvproxy.sync.deltas import Delta
from kvproxy.sync.heard import Heard
from kvproxy.sync.journal import size_of
from kvproxy.sync.peer import Peer
from kvproxy.sync.peers import Peers
from kvproxy.sync.told_leases import told_of
from kvproxy.sync.watched import acted, session_served
from kvproxy.sync.wire import MAX_DELTAS, Origin, Piece
from kvproxy.sync.world import World
from kvproxy.types import Clock

#: Hashes and paths of the approximate indexes; the rest of a large one is learned anew.
MAX_BYTES = 32 * 1024 * 1024
_PIECE_BYTES = 48 * 1024
#: One step holds the event loop no longer, and pieces go out with this pause: a worker's socket holds a few.
SLICE_S, _PIECE_S = 0.003, 0.001

log = logging.getLogger("kvproxy.sync")


def take_pieces(
    origin: Origin,
    world: World,
    kvcache: KvCache | None,
    clusters: Mapping[str, Cluster],
    *,
    clock: Clock,
    wall_clock: Clock,
) -> Generator[None, None, list[Piece]]:
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
    pieces = [Piece(origin, number, part, [], True) for number, part in enumerate(parts)]
    known, room = list[Delta](), _PIECE_BYTES
    for delta in _deltas(world, clock()):
        if known and (len(known) == MAX_DELTAS or size_of(delta) > room):
            pieces.append(Piece(origin, len(pieces), b"", known, True))
            known, room = [], _PIECE_BYTES
            yield
        known.append(delta)
        room -= size_of(delta)
    pieces.append(Piece(origin, len(pieces), b"", known, False))
    return pieces


def put_pieces(
    data: bytes,
    rest: Sequence[Delta],
    heard: Heard,
    kvcache: KvCache | None,
    clusters: Mapping[str, Cluster],
    *,
    clock: Clock,
) -> Generator[None, None, None]:
    """What came of them. Raises Unusable for a snapshot that is none of ours; then nothing has been changed."""
    if data and kvcache is not None:
        snapshot = decode(data)
        taken_at = snapshot.kept.taken_at  # by the peer's clock: it was taken just now
        contents = Contents(kvcache.state, clusters=clusters, clock=clock, wall_clock=lambda: taken_at)
        yield from contents.put_back(snapshot, max_age_s=0.0)
    for at in range(0, len(rest), 50):
        heard.apply(rest[at : at + 50], clock())
        yield


def _deltas(world: World, now: float) -> Iterator[Delta]:
    for name, part in world.clusters.items():
        if part.indexes is not None:
            for session, response, served in list(part.indexes.last_served.entries()):
                yield session_served(name, session, response, served, now)
        for endpoint, draining in part.drained().items():
            if draining:
                yield deltas.Drained(name, str(endpoint), draining)
    for limit, table in enumerate(world.limits):
        yield from _spent(limit, table.missing(now))
    if world.actions is not None and world.actions.pin is not None:
        for (instance, _), lease in world.actions.pin.leases(now).items():
            yield acted(Action(ActionKind.PIN, instance, lease.prefix, "pinned"), now - lease.pinned_at)
    if world.actions is not None and world.actions.leasing is not None:
        yield from told_of(world.actions.leasing.book, now)


def _spent(limit: int, missing: Iterator[tuple[str, str, float]]) -> Iterator[Delta]:
    return (deltas.Spent(limit, key, kind, amount) for key, kind, amount in list(missing))


class Handover:
    """Gives what is known here to a new proxy, and takes what another gives."""

    def __init__(self, peers: Peers, tasks: TaskSet, *, clock: Clock, wall_clock: Clock) -> None:
        self._peers, self._tasks, self._clock, self._wall_clock = peers, tasks, clock, wall_clock
        self._given: set[Origin] = set()  # at present
        self.follow(World({}), None, {})

    def follow(self, world: World, kvcache: KvCache | None, clusters: Mapping[str, Cluster]) -> None:
        """This is what there is."""
        self._world, self._kvcache, self._clusters = world, kvcache, clusters

    def give(self, peer: Origin) -> None:
        """All of it, a piece at a time."""
        if peer not in self._given:
            self._tasks.start(self._give(peer), name="sync snapshot")

    def take(self, peer: Peer, data: bytes, rest: Sequence[Delta]) -> None:
        """As of ReceiveSnapshot."""
        self._tasks.start(self._take(peer, data, rest), name="sync join")

    async def _give(self, peer: Origin) -> None:
        self._given.add(peer)
        times = {"clock": self._clock, "wall_clock": self._wall_clock}
        try:
            steps = take_pieces(self._peers.origin, self._world, self._kvcache, self._clusters, **times)
            for piece in await run_in_slices(steps, slice_s=SLICE_S, clock=self._clock):
                self._peers.send_to(peer, piece)
                await asyncio.sleep(_PIECE_S)
        finally:
            self._given.discard(peer)

    async def _take(self, peer: Peer, data: bytes, rest: Sequence[Delta]) -> None:
        told = False
        try:
            steps = put_pieces(data, rest, peer.heard, self._kvcache, self._clusters, clock=self._clock)
            await run_in_slices(steps, slice_s=SLICE_S, clock=self._clock)
            told = True
            log.info("joined: %d bytes of index and %d other things from %s", len(data), len(rest), peer.origin)
        except Unusable as error:
            log.warning("the index of %s is not taken over: %s", peer.origin, error)
        finally:
            self._peers.newcomer.end(self._clock(), told=told)
