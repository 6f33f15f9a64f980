"""One loop timer for many waits of the same length: one for each would cost more than what it guards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")


class SharedTimer(Generic[K]):
    """Calls `on_due(key)` once `delay_s` have passed since `add(key)`, unless `remove(key)` came first.

    Since all wait equally long, the oldest is always the next one due. Holds what was added and not removed.
    """

    __slots__ = ("_due", "_on_due", "_timer", "delay_s")

    def __init__(self, delay_s: float, on_due: Callable[[K], None]) -> None:
        self.delay_s = delay_s
        self._on_due = on_due
        self._due: dict[K, float] = {}  # loop time, oldest first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: K) -> None:
        """Begin to wait. A key is added once at a time."""
        loop = asyncio.get_running_loop()
        self._due[key] = due = loop.time() + self.delay_s
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)

    def remove(self, key: K) -> bool:
        """Wait no longer; whether it was still waited for."""
        return self._due.pop(key, None) is not None

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for key, due in list(self._due.items()):
            if due > now:
                self._timer = loop.call_at(due, self._look)
                return
            if self.remove(key):  # not removed by one that came due before it
                self._on_due(key)
