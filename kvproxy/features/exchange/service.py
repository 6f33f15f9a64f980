"""The long-lived exchange with other processes: links, timers, and what is seen of them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import msgspec
from pydantic import SecretStr
from xxhash import xxh3_64_intdigest

from kvproxy.base.background_task import TaskSet
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import Clock
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.features.exchange import wire
from kvproxy.features.exchange.claims import PeerClaims
from kvproxy.features.exchange.datagrams import DatagramLink, Link
from kvproxy.features.exchange.journal import Journal
from kvproxy.features.exchange.metrics import SyncMetrics
from kvproxy.features.exchange.peer_status import IdCollision, bind_gauges, describe
from kvproxy.features.exchange.peers import Peers, SyncStatus
from kvproxy.features.exchange.ray_link import RayLink
from kvproxy.features.exchange.settings import SyncPlace, SyncSettings
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.snapshot import Handover
from kvproxy.features.exchange.stores import NatsLink, RedisLink, StoreLink
from kvproxy.features.exchange.wire import Origin
from kvproxy.operate.companion import Companion, Serving, Siblings
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.filters import kvcache as kvcache_filter

log = logging.getLogger("kvproxy.sync")

#: Checks for missing batches per heartbeat.
_LOOKS = 5


class SyncService(Companion):
    """Shares what the proxy routes, learns and spends with other processes."""

    def __init__(
        self, config: Config, *, siblings: Siblings | None, metrics: Metrics, clock: Clock, wall_clock: Clock
    ) -> None:
        self._settings = settings = part_of(config, SyncPlace).sync
        self._siblings = siblings
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        port = config.listen.port or (os.getpid() if siblings is None else 0)
        host = settings.replica or f"{socket.gethostname()}:{port}"
        if siblings is not None and not settings.replica:
            host = f"{host}-{xxh3_64_intdigest(str(siblings.folder).encode()) & 0xFFFF:04x}"
        self.origin = Origin(host, 0 if siblings is None else siblings.number, int(wall_clock() * 1e6))
        self.namesake = IdCollision(self.origin, beat_s=settings.heartbeat, clock=clock)
        self._tasks = TaskSet()
        self._soon = PublishTimer(lambda: self.peers.publish(clock()), settings.interval, self._tasks)
        self.journal = Journal(self.origin, on_news=self._soon.start)
        self.peers = Peers(
            self.journal,
            lambda: self._world,
            send=self._send,
            beat_s=settings.heartbeat,
            serve=lambda peer: self._handover.give(peer),
            receive_snapshot=lambda peer, data, rest: self._handover.take(peer, data, rest),
            other=lambda message: self.locks.receive(message),
            blocks=lambda: self._world.count_blocks(),
        )
        self.locks = PeerClaims(self.peers, self.journal, clock=clock)
        self.store = make_store(
            settings, self.origin, on_message=partial(self._heard, store=True), on_change=self._store_changed
        )
        self._alone_of = 1  # processes there were when the store was lost
        self._met_at_store = False
        self._workers: DatagramLink | None = None
        self._links: list[Link] = []
        self._world = SharedState({})
        self._handover = Handover(self.peers, self._tasks, journal=self.journal, clock=clock, wall_clock=wall_clock)
        self._running = AsyncExitStack()
        self._outcomes = metrics.group(SyncMetrics).messages
        if (store := self.store) is not None:
            metrics.group(SyncMetrics).store_up.set_source(lambda: [((), float(store.connected))])
        bind_gauges(
            metrics,
            self.peers,
            self.journal,
            self._links,
            status=lambda: self.status,
            blocks=lambda: self._world.count_blocks(),
            clock=clock,
        )

    async def __aenter__(self) -> SyncService:
        async with AsyncExitStack() as starting:
            await starting.enter_async_context(self._tasks)
            starting.callback(self._soon.stop)
            if self._siblings is not None:
                self._workers = DatagramLink(self._siblings, on_message=partial(self._heard, store=False))
                self._links.append(await starting.enter_async_context(self._workers))
            if self.store is not None:
                self._links.append(await starting.enter_async_context(self.store))
            self._running = starting.pop_all()
        self.peers.join(self._clock())
        self._tasks.start(self._keep_time(), name="sync")
        if isinstance(self.store, RedisLink):
            self._tasks.start(self._handover.keep_in(self.store, self.locks), name="sync keep")
        self._soon.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._soon.publish()
        self.peers.leave()
        await self._running.aclose()
        self._links.clear()

    def follow(self, serving: Serving) -> None:
        """Share what this configuration has."""
        kvcache = serving.kvcaches.get(kvcache_filter.NAME)
        world = SharedState.of(serving.clusters, kvcache, limits=serving.limits, budgets=serving.budgets)
        self.share(world, kvcache, serving.clusters)

    def share(self, world: SharedState, kvcache: KvCache | None, clusters: Mapping[str, Cluster]) -> None:
        """Share this from now on."""
        self._world = world
        self._handover.follow(world, kvcache, clusters)
        self.journal.follow(world)
        if world.store is not None:
            world.store.locks = self.locks

    @property
    def joining(self) -> bool:
        """True while it receives the others' state."""
        return self.status is SyncStatus.JOINING

    @property
    def status(self) -> SyncStatus:
        """In one word."""
        status = self.peers.status
        away = self.store is not None and not self.store.connected
        return SyncStatus.DEGRADED if away and status is SyncStatus.SYNCED else status

    def describe_state(self) -> dict[str, object]:
        """For people."""
        shown = describe(self.peers, self.journal, self._links, self.status, self._clock())
        return {**shown, "namesake": self.namesake.lives}

    def _store_changed(self, reached: bool) -> None:
        """React to the store. While it is away, common limits are divided by the number of proxies. Afterwards a proxy
        that missed a batch requests it, and one that comes there first joins, whatever other workers sent it."""
        now = self._clock()
        if not reached:
            self._alone_of = 1 + len(self.peers.living)
        elif self.peers.known and self._met_at_store:
            self.peers.beat(now)
        else:
            self.peers.join(now)
        self._met_at_store |= reached
        self._weigh()

    def _weigh(self) -> None:
        away = self.store is not None and not self.store.connected
        near = sum(peer.origin.host == self.origin.host for peer in self.peers.living)
        self.journal.weight = max(1.0, self._alone_of / (1 + near)) if away else 1.0

    def _send(self, payload: bytes, to: Origin | None) -> None:
        near = self._workers is not None and (to is None or to.host == self.origin.host)
        if self._workers is not None and near:
            self._workers.send(payload, to)
        if self.store is not None and (to is None or not near):
            self.store.send(payload, to)
        self._outcomes.labels("sent").inc()
        self._metrics.group(SyncMetrics).bytes.labels("out").inc(len(payload))

    async def _keep_time(self) -> None:
        pause_s = self._settings.heartbeat / _LOOKS
        looks = 0
        while True:
            await asyncio.sleep(pause_s)
            looks += 1
            try:
                now = self._clock()
                self.peers.look(now)
                if looks % _LOOKS == 0:
                    if self._workers is not None:
                        self._workers.renew()
                    self.peers.beat(now)
                    self._weigh()
            except Exception:
                log.exception("the exchange with other processes stumbled")

    # in

    def _heard(self, payload: bytes, *, store: bool) -> None:
        self._metrics.group(SyncMetrics).bytes.labels("in").inc(len(payload))
        try:
            message = wire.decode(payload)
        except msgspec.DecodeError:
            self._outcomes.labels("malformed").inc()
            return
        near = self._workers is not None and message.origin.host == self.origin.host
        try:
            self.namesake.hear(message)
            if near and store:
                return  # it comes by the workers' own way
            if near and self._workers is not None:
                self._workers.know(message.origin.worker)
            self.peers.receive(message, self._clock())
            self._outcomes.labels("received").inc()
        except Exception:
            self._outcomes.labels("failed").inc()
            log.exception("a message of %s could not be applied", message.origin)


class PublishTimer:
    """Publishes what is new, a while after the first of it; not before the service runs."""

    def __init__(self, publish: Callable[[], object], interval_s: float, tasks: TaskSet) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to wait, unless it does so already."""
        if self._timer is None and self._tasks.running:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.publish)

    def publish(self) -> None:
        """Publish now."""
        self.stop()
        self._publish()

    def stop(self) -> None:
        """Publish nothing of what was new."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def make_store(
    settings: SyncSettings,
    origin: Origin,
    *,
    on_message: Callable[[bytes], None],
    on_change: Callable[[bool], None],
) -> StoreLink | None:
    """Return the link to where replicas meet; None: they do not."""
    rng = random.Random()
    actor = None if settings.ray is None else SecretStr(settings.ray)
    for kind, url in ((RedisLink, settings.redis), (NatsLink, settings.nats), (RayLink, actor)):
        if url is not None:
            topic = wire.topic(settings.name)
            beat_s = settings.heartbeat
            return kind(url, topic, origin, on_message=on_message, on_change=on_change, beat_s=beat_s, rng=rng)
    return None
