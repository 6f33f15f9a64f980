"""Metrics of the process and of receipts."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from kvproxy import __version__
from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import Histogram
from kvproxy.base.metrics.groups import MetricGroup, counter, gauge, histogram
from kvproxy.base.types import Clock, Sleep

LAG_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class ReceiptMetrics(MetricGroup):
    """Decision receipts."""

    receipts = counter("kvproxy_receipts", "Decision receipts", "result")  # written, dropped, failed


class ProcessMetrics(MetricGroup):
    """The process."""

    reloads = counter("kvproxy_reloads", "Configurations read again while running", "result")
    build_info = gauge("kvproxy_build_info", "1, with the version of kvproxy", "version", across=Across.MAX)
    loop_lag = histogram(
        "kvproxy_event_loop_lag_seconds",
        "How late the event loop woke a task, sampled four times a second",
        buckets=LAG_BUCKETS_S,
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for result in ("applied", "refused"):
            self.reloads.labels(result)
        self.build_info.labels(__version__).set(1)


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
