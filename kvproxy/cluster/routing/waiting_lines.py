"""In which order requests wait, at the router and in an engine: the one scale of urgency, and lines by tenant.

Least goes first. Own work counts in seconds, so that short prompts overtake long ones (that shortens the mean wait
most), and each second of waiting outweighs AGEING seconds of it, so that no prompt waits for ever: only those go past
a request that are shorter by more than AGEING times what they came later. As a number that is fixed at arrival it
needs no keeping up, and every router, restart and engine that is given it agrees on the order. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

#: Seconds of own work that one second of waiting outweighs.
AGEING = 0.3

#: Seconds that one level of a client's priority is worth: ten seconds of waiting.
LEVEL_S = 3.0


def urgency_s(own_s: float, now: float, *, slowness: float = 1.0, class_s: float = 0.0) -> float:
    """Where a request that came at `now` stands: `own_s` pooled seconds of prefill on an endpoint `slowness` times as
    slow as the pool, and `class_s` seconds that its class or tenant puts it ahead by (negative: behind)."""
    return slowness * own_s + AGEING * now - class_s


ItemT = TypeVar("ItemT")

#: Whether an endpoint has room for a request now.
HasRoom = Callable[[float], bool]


@dataclass(slots=True, eq=False)
class Ticket(Generic[ItemT]):
    """One request in the router queue."""

    item: ItemT
    own_s: float
    queued_at: float  # when it came, or `early_s` before
    class_s: float
    tenant: str
    model: str
    has_room: HasRoom | None = None  # None: it waits for its turn alone
    weight: float = 1.0  # of its tenant
    early_s: float = 0.0  # by which its own deadline is before that of others
    released: bool = False  # released or cancelled: its entry in a line is void

    def let_go(self) -> ItemT:
        """Return the item; the entry that stays in a line for a while no longer holds it."""
        item = self.item
        del self.item
        return item


#: (urgency, number, ticket), the most urgent first.
Entry = tuple[float, int, Ticket[ItemT]]


class WaitingLines(Generic[ItemT]):
    """A line for each model and tenant, and one for those of them that wait for room. Released tickets leave theirs
    when they come to its head, or in a sweep."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, bool], list[Entry[ItemT]]] = {}
        self._number = 0  # of the latest entry
        self._entries = 0

    def __len__(self) -> int:
        """Entries, void ones included."""
        return self._entries

    def add(self, ticket: Ticket[ItemT], urgency: float) -> None:
        """Put a request into its line."""
        self._number += 1
        self._entries += 1
        key = (ticket.model, ticket.tenant, ticket.has_room is not None)
        heapq.heappush(self._lines.setdefault(key, []), (urgency, self._number, ticket))

    def heads(self) -> Sequence[Entry[ItemT]]:
        """Return the most urgent request of each line. Lines that are empty by now are forgotten."""
        for key, line in tuple(self._lines.items()):
            while line and line[0][2].released:
                heapq.heappop(line)
                self._entries -= 1
            if not line:
                del self._lines[key]
        return [line[0] for line in self._lines.values()]

    def sweep(self) -> None:
        """Forgets all void entries."""
        for line in self._lines.values():
            line[:] = [entry for entry in line if not entry[2].released]
            heapq.heapify(line)
        self._entries = sum(map(len, self._lines.values()))
