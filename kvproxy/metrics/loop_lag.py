"""How late the event loop is: what every request waits for when something holds the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvproxy.background_task import BackgroundTask
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock

INTERVAL_S = 0.25


class LoopLag(BackgroundTask):
    """Owns one task that sleeps and sees how much longer that took. Enter it on the loop it is to watch."""

    task_name = "event loop lag"

    def __init__(
        self, metrics: Metrics, *, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._lag = metrics.process.loop_lag
        self._clock = clock
        self._sleep = sleep

    async def _run(self) -> None:
        while True:
            began = self._clock()
            await self._sleep(INTERVAL_S)
            self._lag.observe(max(0.0, self._clock() - began - INTERVAL_S))
