"""Places taken for requests that travel without this proxy: each is settled by its caller, or its lease runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.collectors import CounterCell
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.proxy.metrics import RequestMetrics
from kvproxy.proxy.request.exchange import RandomHex

QUEUE = "picks"
#: Bound on reservations at once; a caller that never settles cannot take more until its places lapse.
MAX_RESERVATIONS = 10_000


class Timer(Protocol):
    """Handle of a `later` call."""

    def cancel(self) -> None: ...


#: Calls back after this many seconds.
Later = Callable[[float, Callable[[], None]], Timer]


def _later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


@dataclass(slots=True)
class PickReservation:
    """One place, and the pick that learns what became of it."""

    id: str
    cluster: Cluster
    pick: Pick
    timer: Timer
    on_lapse: Callable[[], None] | None = None  # called when its lease has run out


class Reservations:
    """Bounded; ids cannot be guessed. A lease that ran out is no failure, and nothing is learned of it."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        clock: Clock,
        later: Later = _later,
        limit: int = MAX_RESERVATIONS,
        queue: str = QUEUE,
    ) -> None:
        self._clock = clock
        self._later = later
        self._limit = limit
        self._held: dict[str, PickReservation] = {}
        self._take_id = RandomHex().take
        self._results = metrics.group(RequestMetrics).pick_reservations
        self._counted: dict[str, CounterCell] = {}  # of these, by result
        metrics.group(BoundMetrics).show_queue(queue, lambda: len(self._held), limit=limit)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def full(self) -> bool:
        """True if there is no place for another one."""
        return len(self._held) >= self._limit

    def hold_pick(self, cluster: Cluster, pick: Pick, *, lease_s: float) -> PickReservation:
        """Keep this pick until it is settled, at most `lease_s`."""
        name = self._take_id(24)
        timer = self._later(lease_s, lambda: self._expire(name))
        held = self._held[name] = PickReservation(name, cluster, pick, timer)
        self._count("made")
        return held

    def first_token(self, name: str) -> bool:
        """Return the engine sent its first token; whether there is such a reservation."""
        held = self._held.get(name)
        if held is not None:
            held.pick.first_token(self._clock())
        return held is not None

    def end_pick(
        self, name: str, outcome: AttemptOutcome, *, cached_tokens: int | None = None
    ) -> PickReservation | None:
        """End a reservation; None when there is no such reservation (any more)."""
        held = self._held.pop(name, None)
        if held is not None:
            held.timer.cancel()
            self._settle(held, outcome, cached_tokens)
            self._count(outcome)
        return held

    def _expire(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self._settle(held, AttemptOutcome.CANCELLED)
            self._count("expired")
            if held.on_lapse is not None:
                held.on_lapse()

    def _count(self, result: str) -> None:
        counter = self._counted.get(result)
        if counter is None:
            counter = self._counted[result] = self._results.labels(result)
        counter.value += 1.0

    def _settle(self, held: PickReservation, outcome: AttemptOutcome, cached_tokens: int | None = None) -> None:
        now = self._clock()
        held.pick.settle(outcome, now)
        if outcome is AttemptOutcome.SUCCESS and cached_tokens is not None:
            held.pick.observe_reuse(cached_tokens, now)
