"""In-flight load of other routers on one endpoint, and how routers with delayed knowledge spread their choices.

The load is the sum of each router's last report. Reports replace each other, so a lost one is corrected by the next.
Pure; the time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from heapq import merge
from operator import itemgetter
from typing import Annotated, Protocol

import msgspec

from kvproxy.cluster.routing.work import (
    HEAD_REQUESTS,
    HEAD_TOKENS,
    NO_WORK,
    Features,
    Finite,
    difference,
    head_of,
    sum_of,
)

#: Rows of others that a sample of speed may still need.
MAX_SHOWN = 256

#: Requests at the head of its line that a router reports one by one; the rest of its head is one entry.
MAX_TOLD = 8


class QueuedWork(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Work waiting for its prefill, and its age."""

    age_s: Finite
    work: Features


def list_head(pending: Iterable[tuple[float, Features]], now: float) -> tuple[QueuedWork, ...]:
    """Of pending work with the oldest first, what the engine would at once be at work on if there were no other."""
    told: list[QueuedWork] = []
    requests = tokens = 0.0
    for at, work in pending:
        if len(told) < MAX_TOLD:
            told.append(QueuedWork(now - at, work))
        else:
            told[-1] = QueuedWork(told[-1].age_s, sum_of(told[-1].work, work))
        requests = requests + work[0]
        tokens = tokens + work[1]
        if tokens >= HEAD_TOKENS or requests >= HEAD_REQUESTS:
            break
    return tuple(told)


class LoadRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One router's ledger of one endpoint. Times are ages, so that no clock is shared; sums are since its start."""

    in_flight: int
    resident_tokens: int
    pending: Features  # prefill work without a first token
    busy_s: Finite  # seconds ago when work began to be pending
    shown_s: Finite  # seconds ago when the engine last showed a first token
    prefilled: Features  # sum of the work whose first token came
    routed_s: Finite = 0.0  # sum of the prefill seconds routed there
    routed: int = 0  # sum of the requests routed there
    bound: int = 0  # of these, those that would have cost much more elsewhere
    #: Head of this router's line, a part of the pending work, the oldest first.
    head: Annotated[tuple[QueuedWork, ...], msgspec.Meta(max_length=MAX_TOLD)] = ()
    kept_s: Finite = -1.0  # seconds since the session came for which room is kept in the engine's memory; -1: for none


class ReplicaSpread(msgspec.Struct, frozen=True):
    """Other routers of the same endpoints; each learns of the others' placements after `delay_s`. `rank`: position of
    this router among them, counted alike by all."""

    delay_s: float
    routers: int
    rank: int

    def choose_spread(
        self,
        best: int,
        costs: Sequence[float],
        weights: Sequence[float],
        places: Sequence[int],
        own_s: float,
        work_s: float,
    ) -> int:
        """Return the endpoint to take where `best` costs least, by place in the order of their ids, which all routers
        share. The request adds `own_s` seconds of prefill at the best; `work_s` of them arrive at all routers a second.

        Placements of others within the delay are unknown, and what looks best here looks best to them. So each endpoint
        belongs to one router, and a request goes to the cheapest of its router's own, unless `best` is cheaper by more
        than the work that may be unknown there: all that others place meanwhile, or half of this request's if that is
        less, so that it stays where half of its prompt is held."""
        owners = min(self.routers, len(costs))  # further routers share with them
        own = self.rank % owners
        if _owner(places[best], owners) == own:
            return best
        unknown_s = min(0.5 * own_s, work_s * self.delay_s * (self.routers - 1) / self.routers)
        least = costs[best]
        near = [
            i
            for i, cost in enumerate(costs)
            if (cost - least) * weights[i] < unknown_s and _owner(places[i], owners) == own
        ]
        return min(near, key=costs.__getitem__, default=best)


def _owner(place: int, owners: int) -> int:
    """Return the owner of an endpoint by its place: one after the other, from another one on in each round, since
    fleets may alternate in kind."""
    return (place + place // owners) % owners


class SharedLoad(Protocol):
    """The ledger that others' load is added to."""

    in_flight: int
    pending_tokens: int
    resident_tokens: int

    def reprice(self) -> None:
        """Invalidate the cached estimates of pending work."""
        ...


class _Told(msgspec.Struct, frozen=True, gc=False):
    row: LoadRow
    busy_at: float
    shown_at: float
    kept_since: float
    line: list[tuple[float, Features]]  # time of placement, work


class RemoteLoad:
    """Others' load on one endpoint, added to the totals of its ledger."""

    __slots__ = (
        "_line",
        "_load",
        "_prefilled",
        "_told",
        "busy_at",
        "in_flight",
        "kept_since",
        "pending",
        "resident_tokens",
        "shown_at",
    )

    def __init__(self, load: SharedLoad) -> None:
        self._load = load
        self._told: dict[Hashable, _Told] = {}
        self.in_flight = self.resident_tokens = 0
        self.pending = NO_WORK
        self._prefilled: deque[tuple[float, Features]] = deque(maxlen=MAX_SHOWN)  # time of first tokens, work
        self.busy_at = self.shown_at = 0.0
        self.kept_since = math.inf  # when the first session came for which others keep room in the engine's memory
        self._line: list[tuple[float, Features]] = []  # the heads of others' lines, the oldest first

    def tell(self, origin: Hashable, row: LoadRow | None, now: float) -> LoadRow | None:
        """Return a router's latest word; None: it is gone. The word before it."""
        before = self._told.pop(origin, None)
        if row is not None:
            line = [(now - one.age_s, one.work) for one in row.head]
            kept_since = now - row.kept_s if row.kept_s >= 0.0 else math.inf
            self._told[origin] = _Told(row, now - row.busy_s, now - row.shown_s, kept_since, line)
            if before is not None:
                done = difference(row.prefilled, before.row.prefilled)
                if done[0]:
                    self._prefilled.append((now - row.shown_s, done))
        self._sum()
        return None if before is None else before.row

    def take_prefilled(self, until: float) -> Features:
        """Return the work that others' first tokens showed up to then, as far as it was not taken yet."""
        taken = NO_WORK
        later = deque[tuple[float, Features]](maxlen=MAX_SHOWN)
        for at, work in self._prefilled:
            if at <= until:
                taken = sum_of(taken, work)
            else:
                later.append((at, work))
        self._prefilled = later
        return taken

    def begin_sample(self, shown_at: float, now: float) -> float:
        """When the engine began with what it is at work on, now that a request comes to a ledger without any; the
        latest first token of that ledger was at `shown_at`."""
        begun = min(now, max(self.busy_at, self.shown_at, shown_at)) if self.pending[0] else now
        self.take_prefilled(begun)
        return begun

    def head_of_all(self, own: Iterable[tuple[float, Features]]) -> Features:
        """Return what the engine is at once at work on, of our own pending work, the oldest first, and others'."""
        return head_of(work for _, work in merge(own, self._line, key=itemgetter(0)))

    def _sum(self) -> None:
        in_flight = resident = 0
        requests = tokens = attention = lower = 0.0
        busy_at = 0.0
        shown_at = 0.0
        line: list[tuple[float, Features]] = []
        for told in self._told.values():
            row = told.row
            in_flight += row.in_flight
            resident += row.resident_tokens
            shown_at = max(shown_at, told.shown_at)
            if row.pending[0]:
                busy_at = told.busy_at if not requests else min(busy_at, told.busy_at)
                a, b, c, d = row.pending
                requests = requests + a
                tokens = tokens + b
                attention = attention + c
                lower = lower + d
                line += told.line
        line.sort(key=itemgetter(0))
        self._line = line
        self.kept_since = min((told.kept_since for told in self._told.values()), default=math.inf)
        load = self._load
        load.in_flight += in_flight - self.in_flight
        load.resident_tokens += resident - self.resident_tokens
        load.pending_tokens += round(tokens) - round(self.pending[1])
        self.in_flight = in_flight
        self.resident_tokens = resident
        self.pending = (requests, tokens, attention, lower)
        self.busy_at = busy_at
        self.shown_at = shown_at
        load.reprice()
