"""Several routers in virtual time, each with delayed knowledge of the others, by the proxy's own exchange."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from kvproxy.base.types import EndpointId
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cluster.prober import ProbeOutcome, TellProbe
from kvproxy.cluster.routing.admission import Admission
from kvproxy.cluster.routing.engine_samples import NOTHING_READ
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Policy
from kvproxy.cluster.routing.work import Features
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.view import IndexView
from kvproxy.lab.simulator.engine_io import KvEvent

#: Interval of heartbeats, as `sync.heartbeat`.
BEAT_S = 0.5
MAX_ROUTERS = 64
MAX_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class RoutersPlan:
    """Number of routers, and the delay of their exchange; `delay_s` None: no exchange."""

    count: int = 1
    delay_s: float | None = 0.01

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_ROUTERS:
            raise ValueError(f"--routers is from 1 to {MAX_ROUTERS}, not {self.count}")
        if self.delay_s is not None and not 0.0 <= self.delay_s <= MAX_DELAY_S:
            raise ValueError(f"--delay is from 0 to {1000 * MAX_DELAY_S:g} ms, not {1000 * self.delay_s:g}")

    def __str__(self) -> str:
        late = "no exchange" if self.delay_s is None else f"{1000 * self.delay_s:g} ms late"
        return f"routers: {self.count}, {late}"


class RoutersCluster:
    """One router's part in the exchange (a ClusterPart)."""

    def __init__(
        self, indexes: LocalIndexes, policy: Policy, admission: Admission | None, endpoints: Sequence[SimEndpoint]
    ) -> None:
        self.indexes: LocalIndexes | None = indexes
        self.policy = policy
        self.admission = admission
        self._loads = {one.id: one.load for one in endpoints}

    def loads(self) -> Iterable[tuple[EndpointId, EndpointLoad]]:
        return self._loads.items()

    def load(self, endpoint: EndpointId) -> EndpointLoad | None:
        return self._loads.get(endpoint)

    def receive_load(self, endpoint: EndpointId, in_flight_before: int) -> None:
        """Nothing waits for it here."""

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool) -> None:
        self.policy.observe_sample(endpoint, work, busy_s, now, scraped=scraped)

    def placed_elsewhere(self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, now: float) -> None:
        self.policy.placed_elsewhere(endpoint, routed_s, requests, bound, len(self._loads), now)

    def drained(self) -> Mapping[EndpointId, bool]:
        return {}

    def drain(self, endpoint: EndpointId, *, draining: bool) -> None:
        """No operator here."""

    def watch_probes(self, tell: TellProbe) -> None:
        """No probes here."""

    def receive_probe(self, engine: EndpointId, outcome: ProbeOutcome) -> None:
        """Nor there."""


#: A router over these endpoints.
MakeRouter = Callable[[Sequence[SimEndpoint], Policy, IndexView], VirtualRouter]


class Replica:
    """One router with its ledgers, index, policy, and its side of the exchange. `engines` are those there may be,
    `there` the numbers of those that are at first."""

    def __init__(
        self,
        number: int,
        engines: Sequence[SimEndpoint],
        there: Iterable[int],
        policy: Policy,
        view: IndexView,
        make_router: MakeRouter = VirtualRouter,
    ) -> None:
        from kvproxy.features.exchange import wire  # one router needs none of it
        from kvproxy.features.exchange.journal import Journal
        from kvproxy.features.exchange.peers import Peers
        from kvproxy.features.exchange.shared_state import SharedState

        self.number = number
        self.view = view
        self.decode = wire.decode
        self.endpoints = [SimEndpoint(one.id, one.index, one.engine) for one in engines]
        self.router = make_router([self.endpoints[index] for index in there], policy, view)
        self.sent: list[bytes] = []
        journal = Journal(wire.Origin("r", number, 1), on_news=lambda: None)
        world = SharedState({"c": RoutersCluster(view.local, policy, self.router.admission, self.endpoints)})
        self.peers = Peers(journal, lambda: world, send=lambda payload, to: self.sent.append(payload), beat_s=BEAT_S)
        journal.follow(world)


class ManyRouters:
    """Router and view in one, in which each request is placed by a random one of the routers. Their messages arrive
    after `delay_s`; None: they send none. `engines` are the run's, of which each router has its own ledger; `there` the
    numbers of those present at first."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        engines: Sequence[SimEndpoint],
        there: Iterable[int],
        delay_s: float | None,
        *,
        chance: Random,
    ) -> None:
        self._replicas = replicas
        self._engines = engines
        self._delay_s = delay_s
        for engine in engines:
            engine.seen_as = [one.endpoints[engine.index] for one in replicas]
        self.endpoints = [engines[index] for index in there]
        self._chance = chance
        self._placed: dict[str, tuple[Replica, Placement]] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._next_beat = BEAT_S
        self.messages = self.bytes = 0
        if delay_s is not None:
            self._introduce(delay_s)

    def arrive(self, request: LiveRequest, now: float) -> Placement | None:
        """Placed, or in the queue of its router (None)."""
        self._deliver(now)
        replica = self._chance.choice(self._replicas)
        return self._place(replica, replica.router.arrive(request, now), now)

    def release(self, now: float) -> Placement | None:
        """Return the next queued request of any router; call until None."""
        self._deliver(now)
        for replica in self._replicas:
            placement = self._place(replica, replica.router.release(now), now)
            if placement is not None:
                return placement
        return None

    def next_release_at(self, now: float) -> float | None:
        """When a router may have something although no load changes."""
        times = [replica.router.next_release_at(now) for replica in self._replicas]
        return min((at for at in times if at is not None), default=None)

    def first_token(self, placement: Placement, now: float) -> None:
        """Pass the first token to the router that placed the request; it reports it to the others."""
        self._deliver(now)
        replica, own = self._placed[placement.request.name]
        replica.router.first_token(own, now)
        self._tell(replica, now)

    def finished(self, placement: Placement, now: float) -> None:
        """Pass the end to the router that placed the request; it reports it to the others."""
        self._deliver(now)
        replica, own = self._placed.pop(placement.request.name)
        replica.router.finished(own, now)
        self._tell(replica, now)

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        """Each router follows the engines itself."""
        for replica in self._replicas:
            replica.view.observe(endpoint, events)

    def join(self, endpoint: SimEndpoint) -> None:
        """Each router is given the new engine."""
        endpoint.prefills = NOTHING_READ
        for replica in self._replicas:
            own = replica.endpoints[endpoint.index]
            own.engine = endpoint.engine
            replica.router.join(own)
        self.endpoints.append(endpoint)

    def leave(self, endpoint: SimEndpoint, lost: Iterable[Placement], now: float) -> None:
        """Each router loses what it placed there."""
        self._deliver(now)
        self.endpoints.remove(endpoint)
        placed = [self._placed.pop(placement.request.name) for placement in lost]
        for replica in self._replicas:
            own = [placement for router, placement in placed if router is replica]
            replica.router.leave(replica.endpoints[endpoint.index], own, now)
            self._tell(replica, now)

    def _place(self, replica: Replica, own: Placement | None, now: float) -> Placement | None:
        """Return the router's placement, on the run's endpoint."""
        if own is None:
            return None
        self._placed[own.request.name] = replica, own
        self._tell(replica, now)
        return Placement(own.request, self._engines[own.endpoint.index], own.reservation, own.settle, own.priority)

    def _introduce(self, delay_s: float) -> None:
        """Let each know the others by a heartbeat, as processes do that have run for a while."""
        for replica in self._replicas:
            replica.peers.beat(-delay_s)
        for replica in self._replicas:
            for payload in replica.sent:
                self._pass_on(replica.number, payload, 0.0)
            replica.sent.clear()

    def _pass_on(self, sender: int, payload: bytes, now: float) -> None:
        message = self._replicas[sender].decode(payload)
        for replica in self._replicas:
            if replica.number != sender:
                replica.peers.receive(message, now)

    def _tell(self, replica: Replica, now: float) -> None:
        if self._delay_s is None:
            return
        replica.peers.publish(now)
        for payload in replica.sent:
            self._count += 1
            self.messages, self.bytes = self.messages + 1, self.bytes + len(payload)
            heapq.heappush(self._under_way, (now + self._delay_s, self._count, replica.number, payload))
        replica.sent.clear()

    def _deliver(self, now: float) -> None:
        if self._delay_s is None:
            return
        while min(self._next_beat, self._under_way[0][0] if self._under_way else self._next_beat) <= now:
            if self._under_way and self._under_way[0][0] <= self._next_beat:
                at, _, sender, payload = heapq.heappop(self._under_way)
                self._pass_on(sender, payload, at)
            else:
                at = self._next_beat
                self._next_beat = self._next_beat + BEAT_S
                for replica in self._replicas:
                    replica.peers.beat(at)
                    self._tell(replica, at)


def connect_routers(
    parts: Sequence[tuple[Policy, IndexView]],
    engines: Sequence[SimEndpoint],
    there: Sequence[int],
    make_router: MakeRouter,
    delay_s: float | None,
    *,
    chance: Random,
) -> tuple[VirtualRouter | ManyRouters, IndexView | ManyRouters]:
    """Return the router of a run, and the receiver of its events: one router and its view, or as many as there are
    parts."""
    if len(parts) == 1:
        policy, view = parts[0]
        return make_router([engines[index] for index in there], policy, view), view
    replicas = [Replica(number, engines, there, *part, make_router) for number, part in enumerate(parts)]
    routers = ManyRouters(replicas, engines, there, delay_s, chance=chance)
    return routers, routers
