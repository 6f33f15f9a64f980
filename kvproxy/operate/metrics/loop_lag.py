"""How late the event loop is."""

from __future__ import annotations

import asyncio

from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.metrics.collectors import Histogram
from kvproxy.base.types import Clock, Sleep

#: Interval between two samples of the event loop's delay.
INTERVAL_S = 0.25


class LoopLag(BackgroundTask):
    """Owns one task that sleeps and observes how much longer that took: what every request waits for when something
    holds the loop it was entered on."""

    task_name = "event loop lag"

    def __init__(self, lag: Histogram, *, clock: Clock, sleep: Sleep = asyncio.sleep) -> None:
        self._lag = lag
        self._clock = clock
        self._sleep = sleep

    async def _run(self) -> None:
        while True:
            began = self._clock()
            await self._sleep(INTERVAL_S)
            self._lag.observe(max(0.0, self._clock() - began - INTERVAL_S))
