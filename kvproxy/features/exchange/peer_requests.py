"""Requests of one peer that are under way, in the indexes and the session tables here."""

from __future__ import annotations

from collections.abc import Callable

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.features.exchange.deltas import Moved, Routed, Settled
from kvproxy.features.exchange.journal import numbers
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.wire import Origin

#: Requests that are under way at a time; of more the oldest counts as served.
MAX_OPEN = 65_536

#: Cluster and number.
Key = tuple[str, int]


def find_indexes(world: SharedState, cluster: str, endpoint: str) -> LocalIndexes | None:
    """Return the indexes that have the endpoint."""
    part = world.clusters.get(cluster)
    return None if part is None or part.load(EndpointId(endpoint)) is None else part.indexes


class PeerRequests:
    """An entry in an index for each. `world` is asked every time: a reload replaces it."""

    def __init__(self, origin: Origin, world: Callable[[], SharedState]) -> None:
        self._origin = origin
        self._world = world
        self.open: dict[Key, SpeculativeEntry] = {}
        self._confirmed: set[Key] = set()  # by the peer's present report of how it stands

    def begin(self, delta: Routed, now: float, *, late: bool = False) -> bool:
        """Enter a request; return False for an endpoint that is not here. One that comes too `late`, as those that a
        newcomer is sent, takes no room in the engine's memory."""
        world = self._world()
        indexes = find_indexes(world, delta.cluster, delta.endpoint)
        if indexes is None:
            return False
        endpoint = EndpointId(delta.endpoint)
        cursor = indexes.approximate.locate(numbers("Q", delta.hashes))
        entry = indexes.approximate.route(endpoint, cursor, in_flight=indexes.followed.any)
        self.open[delta.cluster, delta.number] = entry
        if (admission := world.clusters[delta.cluster].admission) is not None and not late:
            facts = OverlapFacts(delta.tokens, blocks=cursor.hashes, session=delta.session, parent=delta.parent)
            admission.placed_elsewhere((self._origin, delta.number), facts, endpoint, now)
        if len(self.open) > MAX_OPEN:
            self._end(next(iter(self.open)), now, prefilled=True)
        return True

    def move(self, delta: Moved, now: float) -> bool:
        """Move an entry: the turn of its session is the same, at the endpoint where the request was placed. Return
        False for an endpoint that is not here."""
        key = (delta.cluster, delta.number)
        if (entry := self.open.get(key)) is None:
            return True
        if (indexes := find_indexes(self._world(), delta.cluster, delta.endpoint)) is None:
            self._end(key, now, prefilled=delta.kept)
            return False
        self.open[key] = indexes.approximate.move(entry, EndpointId(delta.endpoint), kept=delta.kept)
        return True

    def settle(self, delta: Settled, now: float) -> None:
        """Settle the entry of a request that is over."""
        key = (delta.cluster, delta.number)
        part = self._world().clusters.get(delta.cluster)
        entry = self.open.get(key)
        indexes = None if part is None else part.indexes
        if entry is not None and indexes is not None:
            if delta.reused >= 0:
                indexes.capacities.observe_reuse(entry, delta.reused)
            if delta.denied >= 0:
                indexes.approximate.contradict(entry.endpoint, entry.cursor, delta.denied)
            (indexes.approximate.confirm if delta.prefilled else indexes.approximate.rollback)(entry)
            if delta.lost:
                indexes.approximate.insert(entry.endpoint, entry.cursor)
        self._end_turn(key, now, served=delta.prefilled and not delta.ends, calls_tool=delta.calls_tool)
        self.open.pop(key, None)

    def confirm(self, delta: Routed) -> bool:
        """Keep a request at the next `end_others`; return whether it is not known."""
        key = (delta.cluster, delta.number)
        if len(self._confirmed) < MAX_OPEN:
            self._confirmed.add(key)
        return key not in self.open

    def end_others(self, now: float) -> None:
        """End those that were not confirmed, as served."""
        for key in self.open.keys() - self._confirmed:
            self._end(key, now, prefilled=True)
        self._confirmed.clear()

    def end_turns(self, now: float) -> None:
        """End the turns of sessions: their client may go on with another proxy."""
        for key in self.open:
            self._end_turn(key, now, served=True)

    def give_up(self, now: float) -> None:
        """Count all as never sent: their peer is gone."""
        self.end_turns(now)
        for key in list(self.open):
            self._end(key, now, prefilled=False)

    def _end(self, key: Key, now: float, *, prefilled: bool) -> None:
        self._end_turn(key, now, served=prefilled)
        entry = self.open.pop(key)
        part = self._world().clusters.get(key[0])
        if part is not None and part.indexes is not None:
            index = part.indexes.approximate
            (index.confirm if prefilled else index.rollback)(entry)

    def _end_turn(self, key: Key, now: float, *, served: bool, calls_tool: bool = True) -> None:
        part = self._world().clusters.get(key[0])
        if part is not None and part.admission is not None:
            part.admission.ended_elsewhere((self._origin, key[1]), now, served=served, calls_tool=calls_tool)
