"""The router's own queue: requests wait here, not on an engine, while the endpoints they would go to have enough to
prefill.

A request placed on an engine cannot be overtaken any more; one that waits here goes out in the order that keeps the
mean time to first token short. It is bound late: only when an endpoint has room is the most urgent one asked where it
would go. Is that endpoint busy, the request is held for it, and the next one is asked. What is held for an endpoint
counts as its backlog, so that policies see it; an endpoint with room that nothing is held for is offered to the first
of those held where most is.

Pure: the time is an argument, and waiting is up to the caller, which offers a request when it comes and polls when an
endpoint's load fell or `next_poll_at` has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.costs import Best
from kvproxy.cluster.routing.waiting_lines import AGEING, LEVEL_S, Heap, ItemT, Ticket, WaitingLines, urgency_s

#: Requests asked in one poll where they would go; the next poll goes on from there.
LOOKS = 8


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds and order of the router queue."""

    limit: int = 1024  # requests held; further ones are refused
    admit_below_s: float = 0.3  # an endpoint with less pending prefill has room
    ageing: float = AGEING  # seconds of own work that one second of waiting outweighs
    max_wait_s: float = 300.0  # then out, whatever the endpoints have pending


class FairQueue(Generic[ItemT]):
    """Releases, among the tenants whose requests may go, from the one granted the least work so far; within a tenant
    the most urgent (waiting_lines.py).

    No request goes before another of its tenant and level, where both may go, that came more than its own work over
    `ageing` earlier: what a request waits is bounded by the work that came until then. A poll looks at the endpoints
    that hold requests, by tenant, and asks at most LOOKS requests; all else is O(log waiting).
    """

    def __init__(self, settings: QueueSettings = QueueSettings()) -> None:
        self.settings = settings
        self._lines: WaitingLines[ItemT] = WaitingLines()
        self._arrivals: deque[Ticket[ItemT]] = deque()
        self._waiting: dict[str, int] = {}  # by tenant
        self._granted_s: dict[str, float] = {}  # by tenant that waits, since the queue began to be contended
        self._count = 0
        self._virtual_s = 0.0  # work granted to the tenant released last: where a newcomer starts

    def __len__(self) -> int:
        """Requests waiting."""
        return self._count

    @property
    def pending_s(self) -> float:
        """Prefill seconds of all of them, by what they were when they came."""
        return sum(ticket.own_s for ticket in [*self._arrivals] if not ticket.released)

    def admits(self, endpoint: EndpointId, wait_s: float) -> bool:
        """Whether a request that comes now and would go there, where `wait_s` is pending, need not wait."""
        if wait_s >= self.settings.admit_below_s:
            return False
        return not self._count or not any(self._lines.heads(place) for place in (None, endpoint))

    def offer(self, item: ItemT, own_s: float, now: float, *, level: int = 0, tenant: str = "") -> Ticket[ItemT] | None:
        """Queues a request that takes `own_s` seconds of prefill, of a class so many levels above others; None when the
        queue is full."""
        if self._count >= self.settings.limit:
            return None
        ticket = Ticket(item, own_s, now, level * LEVEL_S, tenant)
        if tenant not in self._waiting:
            self._granted_s[tenant] = self._virtual_s
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        self._count += 1
        self._arrivals.append(ticket)
        self._enter(ticket, None)
        return ticket

    def poll(
        self, waits: Mapping[EndpointId, float], now: float, find_best: Callable[[ItemT, float], Best | None]
    ) -> Ticket[ItemT] | None:
        """The request to place now, if any, and where it then goes `find_best` has just said (None: nowhere, and that
        is to be its answer). Place it and poll again with the new loads.

        `waits`: seconds pending in each endpoint that may be chosen. What is held for another one is asked again.
        """
        oldest = self._oldest()
        if oldest is not None and now - oldest.queued_at >= self.settings.max_wait_s:
            self._ask(oldest, now, find_best)
            return self._take(oldest)
        for _ in range(LOOKS):
            in_turn = self._next_in_turn(waits)
            ticket = in_turn or self._next_for_idle(waits)
            if ticket is None:
                break
            best = self._ask(ticket, now, find_best)
            if best is None or self._has_room(best.endpoint.id, waits):
                return self._take(ticket)
            self._enter(ticket, best)
            if in_turn is None:  # it stays where it was
                break
        return None

    def cancel(self, ticket: Ticket[ItemT]) -> None:
        """The client left. Idempotent, and harmless after the release."""
        if not ticket.released:
            self._drop(ticket)

    def next_poll_at(self, waits: Mapping[EndpointId, float], now: float) -> float | None:
        """When polling may release something although no load changes; None when nothing waits."""
        oldest = self._oldest()
        if oldest is None:
            return None
        least = min(waits.values(), default=0.0)
        pending = [least if place is None else waits.get(place, 0.0) for place in self._lines.endpoints()]
        room_at = now + max(0.0, min(pending) - self.settings.admit_below_s)
        return min(room_at, oldest.queued_at + self.settings.max_wait_s)

    def oldest_wait_s(self, now: float) -> float:
        """How long the request that came first has waited; 0 when nothing waits."""
        oldest = self._oldest()
        return 0.0 if oldest is None else max(0.0, now - oldest.queued_at)

    def retry_after_s(self, now: float) -> float:
        """How long a refused client should stay away: until the oldest waiting request must be out, at least 1 s."""
        oldest = self._oldest()
        return 1.0 if oldest is None else max(1.0, oldest.queued_at + self.settings.max_wait_s - now)

    def reconfigure(self, settings: QueueSettings) -> None:
        """Other bounds and another order from now on. Requests that wait stay, also beyond a smaller limit."""
        # Kept over a reload: each ticket is held by a request that waits, and what tenants were granted counts on.
        ageing, self.settings = self.settings.ageing, settings
        if settings.ageing != ageing:
            self._lines.clear()
            for ticket in self._arrivals:
                if not ticket.released:
                    self._push(ticket)

    def _oldest(self) -> Ticket[ItemT] | None:
        while self._arrivals and self._arrivals[0].released:
            self._arrivals.popleft()
        return self._arrivals[0] if self._arrivals else None

    def _has_room(self, endpoint: EndpointId, waits: Mapping[EndpointId, float]) -> bool:
        """Also where it may not be chosen any more: nothing is to wait for it."""
        return waits.get(endpoint, 0.0) < self.settings.admit_below_s

    def _next_in_turn(self, waits: Mapping[EndpointId, float]) -> Ticket[ItemT] | None:
        """Of those that may go: not asked yet, with room anywhere, or held for an endpoint that has room."""
        anywhere = not waits or any(self._has_room(endpoint, waits) for endpoint in waits)
        places = (one for one in self._lines.endpoints() if (anywhere if one is None else self._has_room(one, waits)))
        return self._first([head for place in places for head in self._lines.heads(place)])

    def _next_for_idle(self, waits: Mapping[EndpointId, float]) -> Ticket[ItemT] | None:
        """The first of those held where most is held, if an endpoint has room: it may go there by now."""
        if not any(self._has_room(endpoint, waits) for endpoint in waits):
            return None
        held = [heads for place in self._lines.endpoints() if (heads := self._lines.heads(place))]
        return self._first(max(held, key=_held_s, default=[]))

    def _first(self, heads: Heap[ItemT]) -> Ticket[ItemT] | None:
        if not heads:
            return None
        return min(heads, key=lambda head: (self._granted_s[head[2].tenant], head[:2]))[2]

    def _ask(self, ticket: Ticket[ItemT], now: float, find_best: Callable[[ItemT, float], Best | None]) -> Best | None:
        """Where it would go if it were not held already."""
        self._leave(ticket)
        return find_best(ticket.item, now)

    def _enter(self, ticket: Ticket[ItemT], best: Best | None) -> None:
        ticket.best = best
        if best is not None:
            ticket.own_s = best.own_s
            best.endpoint.load.held_s += best.pooled_s
        self._push(ticket)

    def _push(self, ticket: Ticket[ItemT]) -> None:
        # own - ageing * (now - queued_at) orders like own + ageing * queued_at: no urgency changes while it waits
        ageing = self.settings.ageing
        self._lines.add(ticket, urgency_s(ticket.own_s, ticket.queued_at, ageing=ageing, class_s=ticket.class_s))

    def _leave(self, ticket: Ticket[ItemT]) -> None:
        """Not held for an endpoint any more."""
        best = ticket.best
        self._lines.remove(ticket)
        if best is not None:
            load = best.endpoint.load
            load.held_s -= best.pooled_s
            if load.held_s < 1e-9:  # what adding and subtracting floats leaves
                load.held_s = 0.0

    def _take(self, ticket: Ticket[ItemT]) -> Ticket[ItemT]:
        granted_s = self._granted_s[ticket.tenant]
        self._virtual_s = max(self._virtual_s, granted_s)
        self._granted_s[ticket.tenant] = granted_s + ticket.own_s
        self._drop(ticket)
        return ticket

    def _drop(self, ticket: Ticket[ItemT]) -> None:
        self._leave(ticket)
        ticket.released = True
        self._count -= 1
        self._waiting[ticket.tenant] -= 1
        if not self._waiting[ticket.tenant]:
            del self._waiting[ticket.tenant], self._granted_s[ticket.tenant]
        if len(self._arrivals) > 2 * self._count + 16:
            self._arrivals = deque(each for each in self._arrivals if not each.released)


def _held_s(heads: Heap[ItemT]) -> float:
    """Of the endpoint that these are held for."""
    best = heads[0][2].best
    return 0.0 if best is None else best.endpoint.load.held_s
