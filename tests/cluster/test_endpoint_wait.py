"""Requests that wait for a first endpoint: in order, within a bound and a time."""

from __future__ import annotations

import asyncio

import pytest

from kvproxy.base.errors import QueueFull
from kvproxy.cluster.endpoint_wait import EndpointWait
from tests.support.clock import FakeClock
from tests.support.until import until


def enter(line: EndpointWait[str], name: str, answers: dict[str, str], asked: list[str]) -> asyncio.Task[str | None]:
    def ask(now: float) -> str | None:
        asked.append(name)
        return answers.get(name)

    return asyncio.create_task(line.wait(ask, 0.5))


async def test_all_that_wait_ask_again_when_there_may_be_an_endpoint(clock: FakeClock) -> None:
    """First come first; those that still have none go on waiting."""
    line: EndpointWait[str] = EndpointWait(100, 60.0, clock=clock)
    answers, asked = {"0": "a", "2": "c"}, list[str]()
    tasks = [enter(line, str(number), answers, asked) for number in range(20)]
    await until(lambda: len(line) == 20)
    assert line.pending_s == 10.0
    clock.advance(3)
    assert line.oldest_wait_s(clock()) == 3
    line.let_in()
    await until(lambda: len(asked) == 20)
    assert asked == [str(number) for number in range(20)]
    assert [await tasks[0], await tasks[2]] == ["a", "c"]
    assert len(line) == 18
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (len(line), line.pending_s, line.oldest_wait_s(clock())) == (0, 0, 0)


async def test_a_thousand_leave_other_tasks_their_turn(clock: FakeClock) -> None:
    """A few a turn of the event loop."""
    line: EndpointWait[str] = EndpointWait(1000, 60.0, clock=clock)
    asked: list[str] = []
    tasks = [enter(line, str(number), {str(number): "x"}, asked) for number in range(1000)]
    await until(lambda: len(line) == 1000)
    line.let_in()
    turns = 0
    while len(asked) < 1000:
        before = len(asked)
        await asyncio.sleep(0)
        assert len(asked) - before <= 8
        turns += 1
    assert turns >= 125
    assert await asyncio.gather(*tasks) == ["x"] * 1000


async def test_the_time_ends(clock: FakeClock) -> None:
    """It asks one last time."""
    line: EndpointWait[str] = EndpointWait(1, 0.0, clock=clock)
    asked: list[str] = []
    assert await enter(line, "a", {}, asked) is None
    assert asked == ["a"]


async def test_the_bound(clock: FakeClock) -> None:
    """Further ones are told when a place is free for sure."""
    line: EndpointWait[str] = EndpointWait(1, 60.0, clock=clock)
    first = enter(line, "a", {}, [])
    await until(lambda: len(line))
    clock.advance(20)
    with pytest.raises(QueueFull) as refused:
        await enter(line, "b", {}, [])
    assert refused.value.retry_after_s == 40.0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_an_error_in_asking_is_that_requests_own(clock: FakeClock) -> None:
    """Its place is free again."""
    line: EndpointWait[str] = EndpointWait(1, 60.0, clock=clock)

    def broken(now: float) -> str | None:
        raise ValueError("no facts")

    task = asyncio.create_task(line.wait(broken, 0.1))
    await until(lambda: len(line))
    line.let_in()
    with pytest.raises(ValueError, match="no facts"):
        await task
    assert len(line) == 0
