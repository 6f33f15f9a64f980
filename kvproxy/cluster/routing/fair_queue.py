"""The router's own queue: requests wait here, not on an engine, while every endpoint that serves their model has enough
to prefill.

A request placed on an engine cannot be overtaken any more; one that waits here goes out in the order that keeps the
mean time to first token short, and is bound late: only when an endpoint has room is it decided where the most urgent
one goes. While any endpoint has capacity nothing waits, so that no prefix holds its requests back from idle endpoints.
Requests that wait for room in an engine's memory have lines of their own, in order of arrival: the first of a line is
not passed by the others, whatever their sizes, and no request of another line waits behind it.

Pure: the time is an argument, and waiting is up to the caller, which offers a request when it comes and polls when an
endpoint's load fell or `next_poll_at` has come.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from kvproxy.cluster.routing.waiting_lines import LEVEL_S, HasRoom, ItemT, Ticket, WaitingLines, urgency_s

#: Least seconds of prefill pending in any candidate endpoint of a model; 0 if there is none, since a request must not
#: wait for that.
LeastWait = Callable[[str], float]

#: An endpoint with less pending prefill, in seconds, has capacity.
ADMIT_BELOW_S = 0.3


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the router queue."""

    limit: int = 1024  # requests held; further ones are refused
    max_wait_s: float = 540.0  # upper bound on the wait, whatever is pending at the endpoints


class FairQueue(Generic[ItemT]):
    """Releases, among the tenants whose requests may go, from the one granted the least work over its weight so far;
    within a tenant the most urgent (waiting_lines.py).

    No request goes before another of its tenant, model and level that came more than its own work over AGEING
    earlier: what a request waits is bounded by the work that came until then. A poll looks at one request for each
    model and tenant; all else is O(log waiting).
    """

    def __init__(self, settings: QueueSettings = QueueSettings()) -> None:
        self.settings = settings
        self._lines: WaitingLines[ItemT] = WaitingLines()
        self._arrivals: deque[Ticket[ItemT]] = deque()
        self._of_tenant: dict[str, int] = {}  # by tenant
        self._granted_s: dict[str, float] = {}  # work over weight, by tenant that waits, since the queue is contended
        self.waiting = 0  # requests
        self.waiting_for_room = 0  # of these
        self._virtual_s = 0.0  # work granted to the tenant released last: where a newcomer starts

    def __len__(self) -> int:
        """Return requests waiting."""
        return self.waiting

    @property
    def pending_s(self) -> float:
        """Prefill seconds of all waiting requests, as estimated at their arrival."""
        return sum(ticket.own_s for ticket in [*self._arrivals] if not ticket.released)

    def offer(
        self,
        item: ItemT,
        own_s: float,
        came_at: float,
        *,
        model: str = "",
        level: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        early_s: float = 0.0,
        has_room: HasRoom | None = None,
    ) -> Ticket[ItemT] | None:
        """Queue a request that takes `own_s` seconds of prefill, of a class `level` above others, of a tenant with this
        `weight`, and until an engine `has_room` for it (None: it needs none); None when the queue is full. One that
        has waited here already `came_at` an earlier time than others before it. One whose deadline is `early_s` before
        `max_wait` counts as having come so much earlier: the earliest deadline goes first."""
        if self.waiting >= self.settings.limit:
            return None
        came_at -= early_s
        ticket = Ticket(item, own_s, came_at, level * LEVEL_S, tenant, model, has_room, weight, early_s)
        if tenant not in self._of_tenant:
            self._granted_s[tenant] = self._virtual_s
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + 1
        self.waiting += 1
        self.waiting_for_room += has_room is not None
        if self._arrivals and came_at < self._arrivals[-1].queued_at:
            insort(self._arrivals, ticket, key=lambda one: one.queued_at)
        else:
            self._arrivals.append(ticket)
        # own - AGEING * (now - queued_at) orders like own + AGEING * queued_at: no urgency changes while it waits
        line_s = own_s if has_room is None else 0.0
        self._lines.add(ticket, urgency_s(line_s, came_at, class_s=ticket.class_s))
        return ticket

    def poll(self, least_wait_s: LeastWait, now: float) -> Ticket[ItemT] | None:
        """Return the request to place now, if any: have its ticket `let_go`, place it, and poll again with the new
        loads."""
        oldest = self._oldest()
        if oldest is not None and now - oldest.queued_at >= self.settings.max_wait_s:
            return self._take(oldest)
        heads = [head for head in self._lines.heads() if least_wait_s(head[2].model) < ADMIT_BELOW_S]
        heads.sort(key=lambda head: (self._granted_s[head[2].tenant], head[:2]))
        for _, _, ticket in heads:
            if ticket.has_room is None or ticket.has_room(now):
                return self._take(ticket)
        return None

    def cancel(self, ticket: Ticket[ItemT]) -> None:
        """Cancel the ticket of a client that left. Idempotent, and harmless after the release."""
        if not ticket.released:
            self._drop(ticket)
            ticket.let_go()

    def next_poll_at(self, least_wait_s: LeastWait, now: float, *, room_at: float = math.inf) -> float | None:
        """When polling may release something although no load changes; None when nothing waits. `room_at`: when room in
        memory may appear."""
        oldest = self._oldest()
        if oldest is None:
            return None
        at = oldest.queued_at + self.settings.max_wait_s
        for _, _, ticket in self._lines.heads():
            over_s = least_wait_s(ticket.model) - ADMIT_BELOW_S
            for_turn = ticket.has_room is None or over_s >= 0.0
            at = min(at, now + max(0.0, over_s) if for_turn else room_at)
        return at

    def oldest_wait_s(self, now: float) -> float:
        """How long the request with the earliest deadline has waited; 0 when nothing waits."""
        oldest = self._oldest()
        return 0.0 if oldest is None else max(0.0, now - oldest.queued_at - oldest.early_s)

    def retry_after_s(self, now: float) -> float:
        """How long a refused client should stay away: until the oldest waiting request must be out, at least 1 s."""
        oldest = self._oldest()
        return 1.0 if oldest is None else max(1.0, oldest.queued_at + self.settings.max_wait_s - now)

    def reconfigure(self, settings: QueueSettings) -> None:
        """Other bounds from now on. Requests that wait stay, also beyond a smaller limit."""
        # Kept over a reload: waiting requests hold tickets, and tenants keep what they were granted.
        self.settings = settings

    def _oldest(self) -> Ticket[ItemT] | None:
        while self._arrivals and self._arrivals[0].released:
            self._arrivals.popleft()
        return self._arrivals[0] if self._arrivals else None

    def _take(self, ticket: Ticket[ItemT]) -> Ticket[ItemT]:
        granted_s = self._granted_s[ticket.tenant]
        self._virtual_s = max(self._virtual_s, granted_s)
        self._granted_s[ticket.tenant] = granted_s + ticket.own_s / ticket.weight
        self._drop(ticket)
        return ticket

    def _drop(self, ticket: Ticket[ItemT]) -> None:
        ticket.released = True
        self.waiting -= 1
        self.waiting_for_room -= ticket.has_room is not None
        self._of_tenant[ticket.tenant] -= 1
        if not self._of_tenant[ticket.tenant]:
            del self._of_tenant[ticket.tenant], self._granted_s[ticket.tenant]
        if len(self._arrivals) > 2 * self.waiting + 16:
            self._arrivals = deque(each for each in self._arrivals if not each.released)
        if len(self._lines) > 2 * self.waiting + 64:
            self._lines.sweep()
