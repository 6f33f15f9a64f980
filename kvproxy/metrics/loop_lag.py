"""How late the event loop is: what every request waits for when something holds the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock

INTERVAL_S = 0.25


class LoopLag:
    """Owns one task that sleeps and sees how much longer that took. Enter it on the loop it is to watch."""

    def __init__(
        self, metrics: Metrics, *, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._lag = metrics.loop_lag
        self._clock = clock
        self._sleep = sleep
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="event loop lag")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began = self._clock()
            await self._sleep(INTERVAL_S)
            self._lag.observe(max(0.0, self._clock() - began - INTERVAL_S))
