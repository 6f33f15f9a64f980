"""The router's own queue: requests wait here, not on an engine, while every engine has enough to prefill.

A request placed on an engine cannot be overtaken any more; one held here goes out in the order that keeps the mean time
to first token short, onto whichever endpoint has become free. Pure: the time is an argument, and waiting is up to the
caller, which offers a request when it comes and polls when an endpoint's load fell or `next_poll_at` has come.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds and order of the router queue."""

    limit: int = 1024  # requests held; further ones are refused
    admit_below_s: float = 0.3  # an endpoint with less pending prefill takes a request
    ageing: float = 0.3  # seconds of own work that one second of waiting outweighs
    max_wait_s: float = 30.0  # then out, whatever the endpoints have pending


@dataclass(slots=True, eq=False)
class Ticket(Generic[ItemT]):
    """One request in the queue."""

    item: ItemT
    own_s: float
    queued_at: float
    tenant: str
    released: bool = False  # released or cancelled


@dataclass(slots=True)
class _Line(Generic[ItemT]):
    """One tenant's waiting requests and the work it was granted, in seconds since the queue began to be contended."""

    granted_s: float
    waiting: int = 0
    heap: list[tuple[int, float, int, Ticket[ItemT]]] = field(default_factory=list)


class FairQueue(Generic[ItemT]):
    """Releases, among the tenants that wait, from the one granted the least work so far; within a tenant the highest
    priority first, then the least `own_s - ageing * waited`. Every operation is O(log waiting) or O(tenants waiting).
    """

    def __init__(self, settings: QueueSettings = QueueSettings()) -> None:
        self.settings = settings
        self._lines: dict[str, _Line[ItemT]] = {}
        self._arrivals: deque[Ticket[ItemT]] = deque()
        self._waiting = 0
        self._sequence = 0
        self._virtual_s = 0.0  # work granted to the tenant released last: where a newcomer starts

    def __len__(self) -> int:
        """Requests waiting."""
        return self._waiting

    def admits(self, least_wait_s: float) -> bool:
        """Whether a request that comes now, when the freest endpoint has `least_wait_s` pending, need not wait."""
        return self._waiting == 0 and least_wait_s < self.settings.admit_below_s

    def offer(
        self, item: ItemT, own_s: float, now: float, *, priority: int = 0, tenant: str = ""
    ) -> Ticket[ItemT] | None:
        """Queues a request that takes `own_s` seconds of prefill; None when the queue is full."""
        if self._waiting >= self.settings.limit:
            return None
        ticket = Ticket(item, own_s, now, tenant)
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._virtual_s)
        self._sequence += 1
        # own - ageing * (now - queued_at) orders like own + ageing * queued_at: no key ever changes
        heapq.heappush(line.heap, (-priority, own_s + self.settings.ageing * now, self._sequence, ticket))
        self._arrivals.append(ticket)
        line.waiting += 1
        self._waiting += 1
        return ticket

    def poll(self, least_wait_s: float, now: float) -> Ticket[ItemT] | None:
        """The request to place now, if any; place it and poll again with the new loads."""
        overdue = self._overdue(now)
        if overdue is not None:
            return self._take(overdue)
        if self._waiting == 0 or least_wait_s >= self.settings.admit_below_s:
            return None
        return self._take(self._next_in_turn())

    def cancel(self, ticket: Ticket[ItemT]) -> None:
        """The client left. Idempotent, and harmless after the release."""
        if not ticket.released:
            self._drop(ticket)

    def next_poll_at(self, least_wait_s: float, now: float) -> float | None:
        """When polling may release something although no load changes; None when nothing waits."""
        if self._waiting == 0:
            return None
        self._skip_released()
        free_at = now + max(0.0, least_wait_s - self.settings.admit_below_s)
        return min(free_at, self._arrivals[0].queued_at + self.settings.max_wait_s)

    def oldest_wait_s(self, now: float) -> float:
        """How long the request that came first has waited; 0 when nothing waits."""
        if self._waiting == 0:
            return 0.0
        self._skip_released()
        return max(0.0, now - self._arrivals[0].queued_at)

    def reconfigure(self, settings: QueueSettings) -> None:
        """Other bounds and another order from now on. Requests that wait stay, also beyond a smaller limit."""
        # Kept over a reload: each ticket is held by a request that waits, and what tenants were granted counts on.
        shift = settings.ageing - self.settings.ageing
        self.settings = settings
        if shift:
            for line in self._lines.values():
                line.heap = [
                    (priority, key + shift * ticket.queued_at, number, ticket)
                    for priority, key, number, ticket in line.heap
                ]
                heapq.heapify(line.heap)

    def retry_after_s(self, now: float) -> float:
        """How long a refused client should stay away: until the oldest waiting request must be out, at least 1 s."""
        if self._waiting == 0:
            return 1.0
        self._skip_released()
        return max(1.0, self._arrivals[0].queued_at + self.settings.max_wait_s - now)

    def _overdue(self, now: float) -> Ticket[ItemT] | None:
        if self._waiting == 0:
            return None
        self._skip_released()
        oldest = self._arrivals[0]
        return oldest if now - oldest.queued_at >= self.settings.max_wait_s else None

    def _next_in_turn(self) -> Ticket[ItemT]:
        line = min((line for line in self._lines.values() if line.waiting), key=lambda line: line.granted_s)
        while line.heap[0][3].released:
            heapq.heappop(line.heap)
        return line.heap[0][3]

    def _take(self, ticket: Ticket[ItemT]) -> Ticket[ItemT]:
        line = self._lines[ticket.tenant]
        self._virtual_s = max(self._virtual_s, line.granted_s)
        line.granted_s += ticket.own_s
        self._drop(ticket)
        return ticket

    def _drop(self, ticket: Ticket[ItemT]) -> None:
        ticket.released = True
        self._waiting -= 1
        line = self._lines[ticket.tenant]
        line.waiting -= 1
        if line.waiting == 0:
            del self._lines[ticket.tenant]
        elif len(line.heap) > 2 * line.waiting + 16:
            line.heap = [entry for entry in line.heap if not entry[3].released]
            heapq.heapify(line.heap)
        if len(self._arrivals) > 2 * self._waiting + 16:
            self._arrivals = deque(each for each in self._arrivals if not each.released)

    def _skip_released(self) -> None:
        while self._arrivals[0].released:
            self._arrivals.popleft()
