"""The long-lived exchange with other processes: links, timers, and what is seen of them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.background_task import TaskSet
from kvproxy.cluster.cluster import Cluster
from kvproxy.config.schema import Config
from kvproxy.kvcache.actions.strategies import Action
from kvproxy.kvcache.service import KvCache
from kvproxy.kvcache.snapshot.contents import Unusable
from kvproxy.metrics.catalog import Metrics
from kvproxy.sync import wire
from kvproxy.sync.claims import PeerClaims
from kvproxy.sync.datagrams import DatagramLink, Link, Siblings
from kvproxy.sync.deltas import Delta
from kvproxy.sync.journal import Journal
from kvproxy.sync.peer import Peer
from kvproxy.sync.peers import Peers, SyncStatus
from kvproxy.sync.shown import describe, show
from kvproxy.sync.snapshot import put_pieces, take_pieces
from kvproxy.sync.wire import Message, Origin
from kvproxy.sync.world import World
from kvproxy.types import Clock

log = logging.getLogger("kvproxy.sync")

T = TypeVar("T")

#: Looks at what is missing, for each heartbeat.
_LOOKS = 5
#: One step of taking or putting back a snapshot holds the event loop no longer.
_SLICE_S = 0.003


class SyncService:
    """An async context manager. `follow` tells it what there is to share, at the start and after each reload."""

    def __init__(
        self, config: Config, *, siblings: Siblings | None, metrics: Metrics, clock: Clock, wall_clock: Clock
    ) -> None:
        self._settings = settings = config.sync
        self._siblings = siblings
        self._metrics, self._clock, self._wall_clock = metrics, clock, wall_clock
        host = settings.replica or f"{socket.gethostname()}:{config.listen.port or os.getpid()}"
        if siblings is not None and not settings.replica:
            host = f"{host}-{xxh3_64_intdigest(str(siblings.folder).encode()) & 0xFFFF:04x}"
        self.origin = Origin(host, 0 if siblings is None else siblings.number, int(wall_clock() * 1e6))
        self.journal = Journal(self.origin, on_news=self._on_news)
        self.peers = Peers(
            self.journal,
            lambda: self._world,
            send=self._send,
            beat_s=settings.heartbeat,
            serve=self._serve,
            receive_snapshot=self._take_snapshot,
            other=self._receive_claim,
            blocks=self._blocks,
        )
        self.claims = PeerClaims(self.peers, clock=clock)
        self.store: Link | None = None
        self._workers: DatagramLink | None = None
        self._links: list[Link] = []
        self._world = World({})
        self._kvcache: KvCache | None = None
        self._clusters: Mapping[str, Cluster] = {}
        self._tasks = TaskSet()
        self._timer: asyncio.TimerHandle | None = None
        self._serving: set[Origin] = set()
        self._running = AsyncExitStack()
        self._outcomes = metrics.sync.messages
        show(
            metrics, self.peers, self.journal, self._links, status=lambda: self.status, blocks=self._blocks, clock=clock
        )

    async def __aenter__(self) -> SyncService:
        async with AsyncExitStack() as starting:
            await starting.enter_async_context(self._tasks)
            starting.callback(self._stop_timer)
            if self._siblings is not None:
                self._workers = DatagramLink(self._siblings, on_message=partial(self._heard, store=False))
                self._links.append(await starting.enter_async_context(self._workers))
            self._running = starting.pop_all()
        self.peers.join(self._clock())
        self._tasks.start(self._keep_time(), name="sync")
        self._on_news()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._flush()
        self.peers.leave()
        await self._running.aclose()
        self._links.clear()

    def follow(self, world: World, kvcache: KvCache | None, clusters: Mapping[str, Cluster]) -> None:
        """This is what is shared from now on."""
        self._world, self._kvcache, self._clusters = world, kvcache, clusters
        self.journal.follow(world)
        if world.actions is not None:
            world.actions.executor.claims = self

    @property
    def status(self) -> SyncStatus:
        """In one word."""
        return self.peers.status

    def describe_state(self) -> dict[str, object]:
        """For people."""
        return describe(self.peers, self.journal, self._links, self.status, self._clock())

    # what is to be done once

    async def claim(self, what: str, ttl_s: float) -> bool:
        """As of Claims."""
        return await self.claims.claim(what, ttl_s)

    def acted(self, action: Action) -> None:
        """As of Claims."""
        self.journal.acted(action)

    # out

    def _on_news(self) -> None:
        if self._timer is None and self._tasks.running:
            self._timer = asyncio.get_running_loop().call_later(self._settings.interval, self._flush)

    def _flush(self) -> None:
        self._stop_timer()
        self.peers.publish(self._clock())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, payload: bytes, to: Origin | None) -> None:
        near = self._workers is not None and (to is None or to.host == self.origin.host)
        if self._workers is not None and near:
            self._workers.send(payload, to)
        if self.store is not None and (to is None or not near):
            self.store.send(payload, to)
        self._outcomes.labels("sent").inc()
        self._metrics.sync.bytes.labels("out").inc(len(payload))

    async def _keep_time(self) -> None:
        pause_s, looks = self._settings.heartbeat / _LOOKS, 0
        while True:
            await asyncio.sleep(pause_s)
            looks += 1
            try:
                now = self._clock()
                self.peers.look(now)
                if looks % _LOOKS == 0:
                    self.peers.beat(now)
            except Exception:
                log.exception("the exchange with other processes stumbled")

    # in

    def _heard(self, payload: bytes, *, store: bool) -> None:
        self._metrics.sync.bytes.labels("in").inc(len(payload))
        try:
            message = wire.decode(payload)
        except msgspec.DecodeError:
            self._outcomes.labels("malformed").inc()
            return
        near = self._workers is not None and message.origin.host == self.origin.host
        if near and store:
            return  # it comes by the workers' own way
        if near and self._workers is not None:
            self._workers.know(message.origin.worker)
        try:
            self.peers.receive(message, self._clock())
            self._outcomes.labels("received").inc()
        except Exception:
            self._outcomes.labels("failed").inc()
            log.exception("a message of %s could not be applied", message.origin)

    def _receive_claim(self, message: Message) -> None:
        self.claims.receive(message)

    # snapshots

    def _serve(self, peer: Origin) -> None:
        if peer not in self._serving:
            self._tasks.start(self._serve_snapshot(peer), name="sync snapshot")

    async def _serve_snapshot(self, peer: Origin) -> None:
        self._serving.add(peer)
        try:
            steps = take_pieces(
                self.origin, self._world, self._kvcache, self._clusters, clock=self._clock, wall_clock=self._wall_clock
            )
            for piece in await self._in_slices(steps):
                self.peers.send_to(peer, piece)
                await asyncio.sleep(0.001)  # its socket holds a few
        finally:
            self._serving.discard(peer)

    def _take_snapshot(self, peer: Peer, data: bytes, deltas: Sequence[Delta]) -> None:
        self._tasks.start(self._put_snapshot(peer, data, deltas), name="sync join")

    async def _put_snapshot(self, peer: Peer, data: bytes, deltas: Sequence[Delta]) -> None:
        try:
            await self._in_slices(
                put_pieces(data, deltas, peer.heard, self._kvcache, self._clusters, clock=self._clock)
            )
            log.info("joined: %d bytes of index and %d other things from %s", len(data), len(deltas), peer.origin)
        except Unusable as error:
            log.warning("the index of %s is not taken over: %s", peer.origin, error)
        finally:
            self.peers.newcomer.end(self._clock())

    async def _in_slices(self, steps: Generator[None, None, T]) -> T:
        while True:
            until = self._clock() + _SLICE_S
            try:
                while self._clock() < until:
                    next(steps)
            except StopIteration as done:
                result: T = done.value
                return result
            await asyncio.sleep(0)

    def _blocks(self) -> int:
        parts = self._world.clusters.values()
        return sum(part.indexes.approximate.entries for part in parts if part.indexes is not None)
