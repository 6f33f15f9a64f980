"""How late the event loop is."""

from __future__ import annotations

import asyncio

from kvproxy.base.metrics.groups import Metrics
from kvproxy.operate.metrics.process import LoopLag, ProcessMetrics
from tests.support.clock import FakeClock


async def test_the_loops_lag_is_what_a_sleep_took_too_long() -> None:
    """And never less than nothing."""
    clock, metrics = FakeClock(), Metrics()
    lags, done = [0.04, -0.01], asyncio.Event()

    async def sleep(seconds: float) -> None:
        if not lags:
            done.set()
            await asyncio.Event().wait()
        clock.advance(seconds + lags.pop(0))

    async with LoopLag(metrics.group(ProcessMetrics).loop_lag, clock=clock, sleep=sleep):
        await done.wait()
    assert metrics.registry.get_sample_value("kvproxy_event_loop_lag_seconds_count") == 2
    total = metrics.registry.get_sample_value("kvproxy_event_loop_lag_seconds_sum")
    assert total is not None
    assert abs(total - 0.04) < 1e-9


async def test_a_sampler_that_was_not_entered_ends_quietly() -> None:
    """A start that failed before it."""
    await LoopLag(Metrics().group(ProcessMetrics).loop_lag, clock=FakeClock()).__aexit__(None, None, None)
