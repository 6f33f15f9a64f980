"""Requests that wait at the router, by the endpoint they are held for and by tenant, the most urgent first. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvproxy.routing.costs import Best
from kvproxy.types import EndpointId

ItemT = TypeVar("ItemT")


@dataclass(slots=True, eq=False)
class Ticket(Generic[ItemT]):
    """One request in the router queue."""

    item: ItemT
    own_s: float
    queued_at: float
    class_s: float
    tenant: str
    number: int = 0  # of its entry in a line; an entry of another number is void
    best: Best | None = None  # the endpoint it is held for; None: it was not asked yet
    released: bool = False  # released or cancelled


#: (urgency, number, ticket), the most urgent first.
Heap = list[tuple[float, int, Ticket[ItemT]]]


class WaitingLines(Generic[ItemT]):
    """A line for each endpoint and tenant; that of endpoint None has the requests that were not asked yet."""

    def __init__(self) -> None:
        self._lines: dict[EndpointId | None, dict[str, Heap[ItemT]]] = {}
        self._number = 0  # of the latest entry
        self._present = 0  # entries that are not void
        self._entries = 0

    def add(self, ticket: Ticket[ItemT], urgency: float) -> None:
        """A request that is in no line joins that of its endpoint."""
        self._number += 1
        ticket.number = self._number
        endpoint = None if ticket.best is None else ticket.best.endpoint.id
        line = self._lines.setdefault(endpoint, {}).setdefault(ticket.tenant, [])
        heapq.heappush(line, (urgency, ticket.number, ticket))
        self._present += 1
        self._entries += 1
        if self._entries > 2 * self._present + 64:
            self._sweep()

    def remove(self, ticket: Ticket[ItemT]) -> None:
        """A request leaves its line, if it is in one."""
        self._present -= ticket.number > 0
        ticket.number, ticket.best = 0, None

    def clear(self) -> None:
        """No request is in a line any more."""
        self._lines.clear()
        self._present = self._entries = 0

    def endpoints(self) -> Iterator[EndpointId | None]:
        """Those that a request is held for, and None if one was not asked yet."""
        return (endpoint for endpoint in tuple(self._lines) if self.heads(endpoint))

    def heads(self, endpoint: EndpointId | None) -> Heap[ItemT]:
        """The most urgent request of each tenant there. Lines that are empty by now are forgotten."""
        lines = self._lines.get(endpoint)
        if lines is None:
            return []
        for tenant, line in tuple(lines.items()):
            while line and line[0][1] != line[0][2].number:
                heapq.heappop(line)
                self._entries -= 1
            if not line:
                del lines[tenant]
        if not lines:
            del self._lines[endpoint]
        return [line[0] for line in lines.values()]

    def _sweep(self) -> None:
        for lines in self._lines.values():
            for line in lines.values():
                line[:] = [entry for entry in line if entry[1] == entry[2].number]
                heapq.heapify(line)
        self._entries = self._present
