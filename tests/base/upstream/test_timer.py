"""The silence timer, on a loop whose time stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from kvproxy.base.upstream.connection import IdleTimer


class FakeHandle:
    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.due = float("inf")


class FakeLoop:
    """time() and call_at() of an event loop; `advance` runs what is due."""

    def __init__(self) -> None:
        self.now = 100.0
        self.armed: list[FakeHandle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, callback: Callable[[], None]) -> FakeHandle:
        self.armed.append(FakeHandle(due, callback))
        return self.armed[-1]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for handle in self.armed:
            if handle.due <= self.now:
                handle.cancel()
                handle.callback()


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def fired() -> list[float]:
    return []


@pytest.fixture
def timer(loop: FakeLoop, fired: list[float]) -> IdleTimer:
    return IdleTimer(cast("asyncio.AbstractEventLoop", loop), lambda: fired.append(loop.now))


def test_it_fires_once_after_silence(timer: IdleTimer, loop: FakeLoop, fired: list[float]) -> None:
    """At the limit, and not again."""
    timer.start(5)
    loop.advance(4)
    assert fired == []
    loop.advance(1)
    loop.advance(50)
    assert fired == [105.0]


def test_a_touch_starts_over(timer: IdleTimer, loop: FakeLoop, fired: list[float]) -> None:
    """Silence is counted from the last touch."""
    timer.start(5)
    loop.advance(4)
    timer.last = loop.now
    loop.advance(4)
    assert fired == []
    loop.advance(1)
    assert fired == [109.0]


def test_stop_and_zero_count_nothing(timer: IdleTimer, loop: FakeLoop, fired: list[float]) -> None:
    """Neither a stopped timer nor a limit of 0 fires."""
    timer.start(5)
    timer.stop()
    loop.advance(10)
    timer.start(0)
    loop.advance(10)
    assert fired == []


def test_requests_in_a_row_arm_one_loop_timer(timer: IdleTimer, loop: FakeLoop, fired: list[float]) -> None:
    """Start and stop cost no timer of the loop while an earlier one is pending."""
    for _ in range(100):
        timer.start(5)
        loop.advance(0.01)
        timer.stop()
    assert len(loop.armed) == 1
    timer.start(5)
    loop.advance(4.5)
    assert fired == []
    loop.advance(0.5)
    assert fired == [pytest.approx(106.0)]


def test_a_shorter_limit_fires_in_time(timer: IdleTimer, loop: FakeLoop, fired: list[float]) -> None:
    """A pending later one does not delay it."""
    timer.start(600)
    timer.start(3)
    loop.advance(3)
    assert fired == [103.0]


def test_close_gives_the_loop_timer_back(timer: IdleTimer, loop: FakeLoop, fired: list[float]) -> None:
    """Nothing stays armed for a connection that is gone."""
    timer.start(5)
    timer.close()
    timer.close()
    loop.advance(10)
    assert fired == []
