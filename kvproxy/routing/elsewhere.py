"""What other routers have in flight on one endpoint: the sum of what each said last, in numbers that only replace each
other, so that what is lost on the way heals with the next word. Pure; the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

import msgspec

from kvproxy.routing.room import HEAD_TOKENS
from kvproxy.routing.work import NO_WORK, Features, Finite, difference, sum_of

#: Words of others that a sample of speed may still need.
MAX_SHOWN = 256


class LoadRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One router's ledger of one endpoint. Times are ages, so that no clock is shared; sums are since its start."""

    in_flight: int
    resident_tokens: int
    pending: Features  # prefill work without a first token
    busy_s: Finite  # ago, when work began to be pending
    shown_s: Finite  # ago, when the engine last showed a first token
    prefilled: Features  # sum of the work that showed its first token
    routed_s: Finite = 0.0  # sum of the prefill seconds that were routed there
    routed: int = 0  # sum of the requests
    bound: int = 0  # of these, such as would have cost much more elsewhere


class SharedLoad(Protocol):
    """The ledger that others' load is added to."""

    in_flight: int
    pending_tokens: int
    resident_tokens: int


class _Told(msgspec.Struct, frozen=True, gc=False):
    row: LoadRow
    busy_at: float
    shown_at: float


class Elsewhere:
    """Others' load on one endpoint, added to the totals of its ledger."""

    __slots__ = ("_load", "_prefilled", "_told", "busy_at", "in_flight", "pending", "resident_tokens", "shown_at")

    def __init__(self, load: SharedLoad) -> None:
        self._load = load
        self._told: dict[Hashable, _Told] = {}
        self.in_flight = self.resident_tokens = 0
        self.pending = NO_WORK
        self._prefilled: deque[tuple[float, Features]] = deque(maxlen=MAX_SHOWN)  # when first tokens showed what work
        self.busy_at = self.shown_at = 0.0

    def tell(self, origin: Hashable, row: LoadRow | None, now: float) -> LoadRow | None:
        """A router's latest word; None: it is gone. The word before it."""
        before = self._told.pop(origin, None)
        if row is not None:
            self._told[origin] = _Told(row, now - row.busy_s, now - row.shown_s)
            if before is not None:
                done = difference(row.prefilled, before.row.prefilled)
                if done[0]:
                    self._prefilled.append((now - row.shown_s, done))
        self._sum()
        return None if before is None else before.row

    def take_prefilled(self, until: float) -> Features:
        """The work that others' first tokens showed up to then, as far as it was not taken yet."""
        taken, later = NO_WORK, deque[tuple[float, Features]](maxlen=MAX_SHOWN)
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

    def head_of_both(self, head: Features) -> Features:
        """What the engine is at once at work on, where `head` is that of our own work."""
        others = self.pending
        tokens = head[1] + others[1]
        if tokens <= HEAD_TOKENS or not others[1]:
            share = 1.0
        else:
            share = max(0.0, HEAD_TOKENS - head[1]) / others[1]
        return (
            head[0] + share * others[0],
            head[1] + share * others[1],
            head[2] + share * others[2],
            head[3] + share * others[3],
        )

    def _sum(self) -> None:
        in_flight = resident = 0
        requests = tokens = attention = lower = 0.0
        busy_at, shown_at = 0.0, 0.0
        for told in self._told.values():
            row = told.row
            in_flight += row.in_flight
            resident += row.resident_tokens
            shown_at = max(shown_at, told.shown_at)
            if row.pending[0]:
                busy_at = told.busy_at if not requests else min(busy_at, told.busy_at)
                a, b, c, d = row.pending
                requests, tokens, attention, lower = requests + a, tokens + b, attention + c, lower + d
        load = self._load
        load.in_flight += in_flight - self.in_flight
        load.resident_tokens += resident - self.resident_tokens
        load.pending_tokens += round(tokens) - round(self.pending[1])
        self.in_flight, self.resident_tokens = in_flight, resident
        self.pending = (requests, tokens, attention, lower)
        self.busy_at, self.shown_at = busy_at, shown_at
