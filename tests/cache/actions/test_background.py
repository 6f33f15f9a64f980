"""Work after responses: bounded, deduplicated, one at a time per lane, drained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cache.actions.job_queue import MAX_HELD_BYTES, Job, JobQueue


class Work:
    """Jobs that wait until they are let go, and note when they run."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.running: set[str] = set()
        self.most_at_once = 0

    def job(self, name: str, *, lane: str | None = None) -> Job:
        async def run() -> bool:
            self.begun.append(name)
            self.running.add(name)
            self.most_at_once = max(self.most_at_once, len(self.running))
            try:
                await self.go.wait()
            finally:
                self.running.discard(name)
            return True

        return Job(name, run, lane=lane)


def background(metrics: Metrics | None = None, **changes: Any) -> JobQueue:
    metrics = metrics or Metrics()
    queue = JobQueue(metrics=metrics, **{"drain_s": 0.05, **changes})
    queue.bind_gauges(metrics)
    return queue


def counted(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("kvproxy_kvcache_background_jobs_total", {"result": result}) or 0.0


def quick(outcome: Callable[[], Awaitable[bool]], name: str = "job") -> Job:
    return Job(name, outcome)


async def test_one_at_a_time_per_lane() -> None:
    """The controller has one socket per worker: parallel actions on an instance break each other."""
    work = Work()
    async with background(max_running=4) as under_test:
        for name in ("pin1", "pin2", "pin3"):
            under_test.submit(work.job(name, lane="vllm-a"))
        under_test.submit(work.job("other", lane="vllm-b"))
        await asyncio.sleep(0)
        assert work.begun == ["pin1", "other"]
        work.go.set()
        await under_test.settled()
    assert work.begun == ["pin1", "other", "pin2", "pin3"]
    assert work.most_at_once == 2


async def test_workers_are_bounded() -> None:
    work = Work()
    async with background(max_running=2) as under_test:
        for number in range(5):
            under_test.submit(work.job(str(number)))
        await asyncio.sleep(0)
        assert len(work.begun) == 2
        work.go.set()
        await under_test.settled()
    assert work.most_at_once == 2
    assert len(work.begun) == 5


async def test_the_same_job_waits_or_runs_once() -> None:
    """A hundred requests for one hot prompt are one pin."""
    metrics, work = Metrics(), Work()
    async with background(metrics, max_running=1) as under_test:
        assert under_test.submit(work.job("pin"))
        assert not under_test.submit(work.job("pin"))
        assert under_test.submit(work.job("next"))
        assert not under_test.submit(work.job("next"))
        work.go.set()
        await under_test.settled()
        assert under_test.submit(work.job("pin"))
        await under_test.settled()
    assert work.begun == ["pin", "next", "pin"]
    assert counted(metrics, "duplicate") == 2


async def test_jobs_hold_a_bounded_amount_of_memory() -> None:
    """A queue of a thousand bodies of 32 MiB would be 32 GiB; one that is larger than the bound alone still may."""
    metrics, work = Metrics(), Work()
    large = MAX_HELD_BYTES // 2 + 1
    async with background(metrics, max_running=1) as under_test:
        jobs = [replace(work.job(str(number)), held_bytes=large) for number in range(2)]
        assert [under_test.submit(job) for job in jobs] == [True, False]
        assert under_test.submit(work.job("small"))
        work.go.set()
        await under_test.settled()
        assert under_test.submit(replace(work.job("huge"), held_bytes=10 * MAX_HELD_BYTES))
        await under_test.settled()
    assert counted(metrics, "dropped") == 1


async def test_a_full_queue_drops_and_counts() -> None:
    metrics, work = Metrics(), Work()
    async with background(metrics, max_running=1, max_waiting=2) as under_test:
        assert [under_test.submit(work.job(str(number))) for number in range(5)] == [True, True, True, False, False]
        assert metrics.registry.get_sample_value("kvproxy_queue_depth", {"queue": "kvcache_background"}) == 2
        assert metrics.registry.get_sample_value("kvproxy_queue_limit", {"queue": "kvcache_background"}) == 2
        work.go.set()
        await under_test.settled()
    assert counted(metrics, "dropped") == 2
    assert counted(metrics, "done") == 3


async def test_shutdown_drains_what_can_be_done() -> None:
    work = Work()
    async with background(max_running=1, drain_s=5) as under_test:
        for number in range(3):
            under_test.submit(work.job(str(number), lane="a"))
        work.go.set()
    assert work.begun == ["0", "1", "2"]
    assert under_test.idle


async def test_shutdown_with_a_full_queue_ends_within_its_bound(caplog: pytest.LogCaptureFixture) -> None:
    """Hanging jobs are cancelled, waiting ones dropped, and both are counted."""
    metrics, work = Metrics(), Work()
    async with asyncio.timeout(60):
        async with background(metrics, max_running=2, max_waiting=10) as under_test:
            for number in range(12):
                under_test.submit(work.job(str(number)))
            await asyncio.sleep(0)
    assert not work.running
    assert counted(metrics, "abandoned") == 12
    assert "12 background jobs are abandoned" in caplog.text
    assert not under_test.submit(work.job("late"))
    assert counted(metrics, "dropped") == 1


async def test_a_job_that_takes_too_long_is_cut() -> None:
    metrics, work = Metrics(), Work()
    async with background(metrics, timeout_s=0.5) as under_test:
        under_test.submit(work.job("stuck", lane="a"))
        await under_test.settled()
        assert counted(metrics, "timeout") == 1
        work.go.set()
        under_test.submit(work.job("next", lane="a"))
        await under_test.settled()
    assert counted(metrics, "done") == 1


async def test_a_broken_job_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    metrics, work = Metrics(), Work()
    work.go.set()

    async def broken() -> bool:
        raise RuntimeError("a mistake")

    async def without_effect() -> bool:
        return False

    with caplog.at_level(logging.ERROR):
        async with background(metrics) as under_test:
            under_test.submit(quick(broken, "broken"))
            under_test.submit(quick(without_effect, "useless"))
            under_test.submit(work.job("fine"))
            await under_test.settled()
    assert "[kvcache] a background job is broken" in caplog.text
    assert (counted(metrics, "failed"), counted(metrics, "done")) == (2, 1)


async def test_a_queue_that_is_not_open_takes_nothing() -> None:
    assert not background().submit(Work().job("early"))
