"""One call at a time per key: the LMCache controller has one unlocked socket per worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvproxy.errors import TooManyWaiting


class KeyedLock:
    """A fair lock per key. At most `max_waiting` callers wait for one key; further ones are refused at once.

    A key costs memory only while somebody holds or awaits it. How long one call may hold it is the call's own timeout.
    """

    def __init__(self, *, max_waiting: int = 16) -> None:
        self.max_waiting = max_waiting
        self._lines: dict[str, _Line] = {}

    def waiting(self, key: str) -> int:
        """Callers that wait for `key` now."""
        line = self._lines.get(key)
        return 0 if line is None else line.callers - 1

    @contextlib.asynccontextmanager
    async def hold(self, *keys: str) -> AsyncIterator[None]:
        """Holds every key (in one global order, so that two callers cannot wait for each other).

        Raises TooManyWaiting when the line for one of them is full.
        """
        async with contextlib.AsyncExitStack() as stack:
            for key in sorted(set(keys)):
                await stack.enter_async_context(self._hold_one(key))
            yield

    @contextlib.asynccontextmanager
    async def _hold_one(self, key: str) -> AsyncIterator[None]:
        line = self._lines.setdefault(key, _Line())
        if line.callers > self.max_waiting:
            raise TooManyWaiting(f"{self.max_waiting} calls wait for {key} already")
        line.callers += 1
        try:
            async with line.lock:
                yield
        finally:
            line.callers -= 1
            if line.callers == 0:
                del self._lines[key]


class _Line:
    """The lock of one key and how many callers hold or await it."""

    __slots__ = ("callers", "lock")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.callers = 0
