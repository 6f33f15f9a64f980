"""Proxies that exchange deltas over a bus the test moves by hand: messages are lost, doubled and late as it says. And
whole ones with their sockets."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.overlap.index_state import IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cluster.prober import ProbeOutcome, TellProbe
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.load import EndpointLoad, Reservation
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.work import Features
from kvproxy.features.exchange import wire
from kvproxy.features.exchange.claims import PeerClaims
from kvproxy.features.exchange.journal import Journal
from kvproxy.features.exchange.operated import find_service
from kvproxy.features.exchange.peers import Peers, SyncStatus
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.wire import Origin
from kvproxy.operate.companion import Siblings
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

A, B = EndpointId("a"), EndpointId("b")
BEAT_S = 0.5


class Cluster:
    """As of ClusterPart, without a proxy around it."""

    def __init__(self, endpoints: Iterable[EndpointId] = (A, B)) -> None:
        self.indexes: LocalIndexes | None = LocalIndexes(IndexState(endpoints=2))
        self.policy = KvAware(rng=Random(0))
        self.admission: Any = None
        self.ledgers = {endpoint: EndpointLoad() for endpoint in endpoints}
        self.samples: list[tuple[EndpointId, Features, float]] = []
        self.draining: dict[EndpointId, bool] = {}
        self.probes: list[tuple[EndpointId, ProbeOutcome]] = []

    def loads(self) -> Iterable[tuple[EndpointId, EndpointLoad]]:
        return self.ledgers.items()

    def load(self, endpoint: EndpointId) -> EndpointLoad | None:
        return self.ledgers.get(endpoint)

    def receive_load(self, endpoint: EndpointId, in_flight_before: int) -> None:
        pass

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool) -> None:
        self.samples.append((endpoint, work, busy_s))

    def placed_elsewhere(self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, now: float) -> None:
        self.policy.placed_elsewhere(endpoint, routed_s, requests, bound, len(self.ledgers), now)

    def drained(self) -> Mapping[EndpointId, bool]:
        return self.draining

    def drain(self, endpoint: EndpointId, *, draining: bool) -> None:
        self.draining[endpoint] = draining

    def watch_probes(self, tell: TellProbe) -> None:
        self.send_probe = tell

    def receive_probe(self, engine: EndpointId, outcome: ProbeOutcome) -> None:
        self.probes.append((engine, outcome))


def chain(*blocks: int) -> array[int]:
    """Hashes of a prompt: each names all before it."""
    found, name = array("Q"), 17
    for block in blocks:
        name = hash((name, block)) & ((1 << 64) - 1)
        found.append(name)
    return found


@dataclass
class Request:
    """One under way."""

    endpoint: EndpointId
    entry: SpeculativeEntry
    reservation: Reservation


class Node:
    """One proxy. `skew_s`: how far its clock is ahead of the bus's."""

    def __init__(self, bus: Bus, name: str, *, epoch: int = 1, skew_s: float = 0.0, worker: int = 0) -> None:
        self.bus, self.skew_s = bus, skew_s
        self.cluster = Cluster()
        self.world = SharedState({"c": self.cluster})
        self.origin = Origin(name, worker, epoch)
        self.journal = Journal(self.origin, on_news=lambda: None)
        self.served: list[Origin] = []
        self.snapshots: list[bytes] = []
        self.peers = Peers(
            self.journal,
            lambda: self.world,
            send=self._send,
            beat_s=BEAT_S,
            serve=self.served.append,
            other=lambda message: self.claims.receive(message),
        )
        self.claims = PeerClaims(self.peers, self.journal, clock=lambda: self.now)
        self.journal.follow(self.world)
        bus.nodes.append(self)

    @property
    def now(self) -> float:
        return self.bus.now + self.skew_s

    def _send(self, payload: bytes, to: Origin | None) -> None:
        self.bus.send(self, payload, to)

    def begin(self, endpoint: EndpointId, *blocks: int, tokens: int = 100) -> Request:
        """Begin a request there."""
        indexes = self.cluster.indexes
        assert indexes is not None
        entry = indexes.route(
            endpoint, indexes.approximate.locate(chain(*blocks)), OverlapFacts(tokens, session=7, parent=8)
        )
        reservation = self.cluster.ledgers[endpoint].reserve(tokens, 0, self.now)
        return Request(endpoint, entry, reservation)

    def move(self, request: Request, endpoint: EndpointId, *, kept: bool) -> None:
        """Have another endpoint compute the prompt of a request, or pull it."""
        assert self.cluster.indexes is not None
        request.entry = self.cluster.indexes.move_entry(request.entry, endpoint, kept=kept)

    def end(self, request: Request, *, prefilled: bool = True, ends: bool = False, calls_tool: bool = True) -> None:
        """End a request."""
        load, indexes = self.cluster.ledgers[request.endpoint], self.cluster.indexes
        assert indexes is not None
        if prefilled:
            load.first_token(request.reservation, self.now)
        load.release(request.reservation, self.now)
        indexes.settle_entry(request.entry, prefilled=prefilled, ends=ends, calls_tool=calls_tool)

    def flush(self) -> None:
        """Send the changes."""
        self.peers.publish(self.now)

    def beat(self) -> None:
        """Send a heartbeat."""
        self.flush()
        self.peers.beat(self.now)
        self.peers.look(self.now)

    def held(self, *blocks: int) -> dict[EndpointId, int]:
        """Leading blocks by endpoint."""
        assert self.cluster.indexes is not None
        index = self.cluster.indexes.approximate
        return index.lookup(index.locate(chain(*blocks)))

    def in_flight(self) -> dict[EndpointId, int]:
        return {endpoint: load.in_flight for endpoint, load in self.cluster.ledgers.items()}


@dataclass
class Sent:
    """A message on its way to one node."""

    to: Node
    payload: bytes


@dataclass
class Bus:
    """`fate` says what becomes of each message to each node: how many copies arrive (1 unless a test says so)."""

    now: float = 100.0
    nodes: list[Node] = field(default_factory=list)
    waiting: list[Sent] = field(default_factory=list)
    fate: Callable[[Sent], int] = lambda sent: 1

    def send(self, sender: Node, payload: bytes, to: Origin | None) -> None:
        for node in self.nodes:
            if node is not sender and (to is None or node.origin == to):
                sent = Sent(node, payload)
                self.waiting += [sent] * self.fate(sent)

    def deliver(self, *, shuffle: Random | None = None) -> None:
        """Everything under way arrives, with what is sent meanwhile."""
        while self.waiting:
            waiting, self.waiting = self.waiting, []
            if shuffle is not None:
                shuffle.shuffle(waiting)
            for sent in waiting:
                if sent.to in self.nodes:
                    sent.to.peers.receive(wire.decode(sent.payload), sent.to.now)

    def heal(self, rounds: int = 8) -> None:
        """Nothing is lost any more, and some heartbeats pass."""
        self.fate = lambda sent: 1
        for _ in range(rounds):
            self.now += BEAT_S
            for node in self.nodes:
                node.beat()
            self.deliver()


def pair(*, skew_s: float = 0.0) -> tuple[Bus, Node, Node]:
    """Two that know each other."""
    bus = Bus()
    one, two = Node(bus, "one"), Node(bus, "two", skew_s=skew_s)
    bus.heal(2)
    return bus, one, two


def join_third(bus: Bus) -> Node:
    """Join a third one that has requested the state of one of two."""
    three = Node(bus, "three")
    three.peers.join(three.now)
    bus.deliver()
    bus.now += 0.1
    look_twice(three)
    bus.deliver()
    return three


def look_twice(node: Node) -> None:
    """As a process does that has read what came between."""
    for _ in range(2):
        node.peers.look(node.now)


class Deciding:
    """A running proxy that decides as one with others."""

    def __init__(self, running: RunningProxy) -> None:
        service = find_service(running.proxy)
        assert service is not None
        self.proxy, self.sync, self._running = running.proxy, service, running
        self.metric = running.metric

    @property
    def status(self) -> SyncStatus:
        return self.sync.status

    def entries(self) -> int:
        """Blocks in its approximate index."""
        assert self.proxy.kvcache is not None
        return self.proxy.kvcache.overlap.indexes["default"].approximate.counts.entries

    def sessions(self) -> int:
        """Of which it knows where they are."""
        assert self.proxy.kvcache is not None
        return self.proxy.kvcache.overlap.indexes["default"].last_served.sessions

    async def ask(self, text: str = "a" * 4000, session: str = "") -> httpx.Response:
        headers = {"x-dynamo-session-id": session} if session else {}
        return await self._running.client.post("/v1/chat/completions", json=chat(text), headers=headers)

    def spent(self) -> float:
        """Return requests that are missing in its rate limit's buckets."""
        table = self.sync._world.limits["rate_limit"]
        return sum(amount for _, _, amount in table.missing(self.proxy.clock()))


@contextlib.asynccontextmanager
async def deciding(
    engine_url: str, *, siblings: Siblings | None = None, ahead_s: float = 0.0, **config: Any
) -> AsyncIterator[Deciding]:
    """In front of one engine, by KV."""
    config = {"policy": "kv_aware", **config}
    async with running_proxy({"a": engine_url}, siblings=siblings, ahead_s=ahead_s, **config) as running:
        yield Deciding(running)


async def until_synced(*proxies: Deciding) -> None:
    """Each hears all the others, and nothing is missing."""
    await until(lambda: all(one.status is SyncStatus.SYNCED for one in proxies))
