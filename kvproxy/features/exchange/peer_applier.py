"""Apply one peer's messages: deltas in order, load rows as they arrive. Unknown parts are left out."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.overlap.last_served import Served
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.store import Action, ActionKind
from kvproxy.cluster.routing.remote_load import RemoteLoad
from kvproxy.features.exchange import deltas
from kvproxy.features.exchange.deltas import Delta, EndpointLoads
from kvproxy.features.exchange.journal import Journal, numbers
from kvproxy.features.exchange.peer_requests import PeerRequests, find_indexes
from kvproxy.features.exchange.shared_state import ClusterPart, SharedState
from kvproxy.features.exchange.wire import Origin, PeerSnapshot

log = logging.getLogger("kvproxy.sync")

#: Applies one delta of a peer at a time.
Apply = Callable[["PeerApplier", Any, "SharedState", float], None]


class PeerApplier:
    """One peer's. `world` is asked every time: a reload replaces it."""

    def __init__(self, origin: Origin, world: Callable[[], SharedState], journal: Journal) -> None:
        self.origin = origin
        self.told = 0  # prompts received, as in Heartbeat
        self.unknown = self.failed = 0  # deltas about unknown objects, and deltas that could not be applied
        self.late = False  # the present deltas are of times that are over
        self.unsure = False  # one of them concerned a request in flight: until the peer sends its state
        self.journal = journal
        self.requests = PeerRequests(origin, world)
        self._world = world
        self._rows: set[tuple[str, str]] = set()  # endpoints with its load
        self._missed = 0  # prompts of the parts of a report so far that were never received

    def apply(self, said: Iterable[Delta], now: float, *, late: bool = False) -> None:
        """Apply deltas, the oldest first. A delta that cannot be applied is dropped alone. `late`: they are of times
        that are over."""
        world = self._world()
        self.late = late
        for delta in said:
            self._try(_APPLY[type(delta)], delta, world, now)
        self.late = False

    def load(self, loads: Iterable[EndpointLoads], now: float) -> None:
        """Show ledgers of the peer as they are now."""
        clusters = self._world().clusters
        for one in loads:
            key = (one.cluster, one.endpoint)
            part = clusters.get(one.cluster)
            if part is None or part.load(EndpointId(one.endpoint)) is None:
                self.unknown += 1
            else:
                self._rows.add(key)
                _show_load(self.origin, part, EndpointId(one.endpoint), one, now)

    def stand(self, standing: PeerSnapshot, now: float) -> int | None:
        """Replace the peer's requests in flight with those after a batch, whatever was lost before it: others count as
        served. Returns the number of prompts never received; None: there are more parts to come."""
        for one in standing.open:
            if self.requests.confirm(one):
                self._missed += 1
                self._try(_begin, one, self._world(), now)
        if standing.more:
            return None
        self.requests.end_others(now)
        lost = standing.told - self.told - self._missed
        self._missed = 0
        self.told = standing.told
        self.unsure = False
        return max(0, lost)

    def hide_load(self, now: float) -> None:
        """Drop the load of a peer that fell silent; its requests in flight stay where they are."""
        self.requests.end_turns(now)
        clusters = self._world().clusters
        for cluster, endpoint in self._rows:
            if (part := clusters.get(cluster)) is not None and part.load(EndpointId(endpoint)) is not None:
                _show_load(self.origin, part, EndpointId(endpoint), None, now)
        self._rows.clear()

    def leave(self, now: float) -> None:
        """Drop all of a peer that is gone; its requests in flight count as never sent."""
        self.hide_load(now)
        self.requests.give_up(now)

    def find_indexes(self, world: SharedState, cluster: str, endpoint: str) -> LocalIndexes | None:
        """Return the indexes that have the endpoint; an unknown one is counted."""
        indexes = find_indexes(world, cluster, endpoint)
        self.unknown += indexes is None
        return indexes

    def _try(self, do: Apply, delta: Delta, world: SharedState, now: float) -> None:
        try:
            do(self, delta, world, now)
        except Exception:
            self.failed += 1
            if self.failed == 1:  # the rest is counted
                log.exception("%s of %s could not be applied and is left out", type(delta).__name__, self.origin)
            self.unsure |= isinstance(delta, deltas.Routed | deltas.Moved | deltas.Settled)


def _show_load(origin: Origin, part: ClusterPart, endpoint: EndpointId, one: EndpointLoads | None, now: float) -> None:
    load = part.load(endpoint)
    assert load is not None
    load.remote_load = load.remote_load or RemoteLoad(load)
    before = load.in_flight
    row = None if one is None else one.row
    earlier = load.remote_load.tell(origin, row, now)
    if part.admission is not None:
        kept = part.admission.kept_elsewhere
        (kept.add if load.remote_load.kept_since < math.inf else kept.discard)(endpoint)
    part.receive_load(endpoint, before)
    if row is not None and earlier is not None and row.routed > earlier.routed:
        routed_s = row.routed_s - earlier.routed_s
        bound = row.bound - earlier.bound
        part.placed_elsewhere(endpoint, routed_s, row.routed - earlier.routed, bound, now)


def _routed(peer: PeerApplier, delta: deltas.Routed, world: SharedState, now: float) -> None:
    peer.told += 1
    if (delta.cluster, delta.number) not in peer.requests.open:
        _begin(peer, delta, world, now)


def _begin(peer: PeerApplier, delta: deltas.Routed, world: SharedState, now: float) -> None:
    peer.unknown += not peer.requests.begin(delta, now, late=peer.late)


def _moved(peer: PeerApplier, delta: deltas.Moved, world: SharedState, now: float) -> None:
    peer.unknown += not peer.requests.move(delta, now)


def _settled(peer: PeerApplier, delta: deltas.Settled, world: SharedState, now: float) -> None:
    peer.requests.settle(delta, now)


def _started(peer: PeerApplier, delta: deltas.Started, world: SharedState, now: float) -> None:
    if (indexes := peer.find_indexes(world, delta.cluster, delta.endpoint)) is not None:
        peer.journal.starts[delta.cluster, delta.endpoint] = delta.started_at
        indexes.process_started(EndpointId(delta.endpoint), delta.started_at)


def _served(peer: PeerApplier, delta: deltas.SessionServed, world: SharedState, now: float) -> None:
    part = world.clusters.get(delta.cluster)
    if part is None or part.indexes is None:
        peer.unknown += 1
        return
    table = part.indexes.last_served
    if not delta.endpoint:
        table.forget(delta.session)
        return
    keys = numbers("Q", delta.keys)
    root = numbers("Q", delta.root)
    served = Served(EndpointId(delta.endpoint), 0, now - delta.age_s, delta.prompt_tokens, delta.tokens, keys, root)
    table.adopt(delta.session, delta.response, served)


def _counted(peer: PeerApplier, delta: deltas.Counted, world: SharedState, now: float) -> None:
    if world.state is not None:
        world.state.note_count(delta.model, (delta.key,) * bool(delta.key), delta.prompt_bytes, delta.prompt_tokens)


def _sampled(peer: PeerApplier, delta: deltas.Sample, world: SharedState, now: float) -> None:
    part = world.clusters.get(delta.cluster)
    endpoint = EndpointId(delta.endpoint)
    if part is None or part.load(endpoint) is None:
        peer.unknown += 1
        return
    part.observe_sample(endpoint, delta.work, delta.busy_s, now, scraped=delta.scraped)


def _used(peer: PeerApplier, delta: deltas.Used, world: SharedState, now: float) -> None:
    if world.hotness is None:
        peer.unknown += 1
    elif delta.keys:
        world.hotness.adopt_use(
            numbers("Q", delta.keys),
            model=delta.model,
            cache_salt=delta.cache_salt,
            instance=delta.instance,
            now=now,
            session=delta.session,
        )


def _acted(peer: PeerApplier, delta: deltas.Acted, world: SharedState, now: float) -> None:
    hotness = world.hotness
    if hotness is None or world.store is None or delta.kind not in ActionKind.__members__.values():
        peer.unknown += 1
        return
    prefix = None
    if delta.key:
        tokens = numbers("I", delta.tokens)
        prefix = hotness.find_prefix(delta.key) or KnownPrefix(
            delta.key, delta.model, delta.cache_salt, deque(maxlen=1), delta.key, tokens
        )
        if tokens and not prefix.tokens:
            hotness.learn_tokens([prefix], tokens)
    action = Action(ActionKind(delta.kind), delta.instance, prefix, "elsewhere")
    world.store.adopt_action(action, now - delta.age_s)


def _spent(peer: PeerApplier, delta: deltas.Spent, world: SharedState, now: float) -> None:
    if (table := world.limits.get(delta.limit)) is not None:
        (table.take_until if delta.at_least else table.take)(delta.key, delta.kind, delta.amount, now)


def _retried(peer: PeerApplier, delta: deltas.Retried, world: SharedState, now: float) -> None:
    for budget in world.budgets.values():
        budget.count_others(delta.requests, delta.retries, now)


def _drained(peer: PeerApplier, delta: deltas.Drained, world: SharedState, now: float) -> None:
    part = world.clusters.get(delta.cluster)
    endpoint = EndpointId(delta.endpoint)
    if part is None:
        return
    own = part.drained().get(endpoint)
    if peer.journal.drains.receive(delta.cluster, delta.endpoint, draining=delta.draining, own=own):
        part.drain(endpoint, draining=delta.draining)


def _entered(peer: PeerApplier, delta: deltas.Entered, world: SharedState, now: float) -> None:
    peer.told += 1
    if (indexes := peer.find_indexes(world, delta.cluster, delta.endpoint)) is not None:
        cursor = indexes.approximate.locate(numbers("Q", delta.hashes))
        indexes.approximate.insert(EndpointId(delta.endpoint), cursor)


def _read(peer: PeerApplier, delta: deltas.EngineRead, world: SharedState, now: float) -> None:
    world.hear_engine(delta)


def _probed(peer: PeerApplier, delta: deltas.Probed, world: SharedState, now: float) -> None:
    world.receive_probe(delta, near=peer.origin.host == peer.journal.origin.host)


_APPLY: Mapping[type[Delta], Apply] = {
    deltas.Routed: _routed,
    deltas.Moved: _moved,
    deltas.Settled: _settled,
    deltas.Entered: _entered,
    deltas.Started: _started,
    deltas.SessionServed: _served,
    deltas.Counted: _counted,
    deltas.Sample: _sampled,
    deltas.Used: _used,
    deltas.Acted: _acted,
    deltas.Spent: _spent,
    deltas.Retried: _retried,
    deltas.EngineRead: _read,
    deltas.Probed: _probed,
    deltas.Drained: _drained,
}
