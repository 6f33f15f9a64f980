"""The one background task of a thing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

import pytest

from kvproxy.base.background_task import (
    CANCELLATIONS,
    BackgroundTask,
    ask_each,
    cancel_tasks,
    in_slices,
    raise_if_cancelled,
    run_in_slices,
)


class Waiting(BackgroundTask):
    """Waits for ever, or breaks at once."""

    task_name = "waiting"

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken
        self.began = asyncio.Event()
        self.cancelled = False

    async def _run(self) -> None:
        self.began.set()
        if self._broken:
            raise RuntimeError
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_the_task_lives_inside_the_block() -> None:
    """Named, begun on entering, cancelled and over on leaving."""
    async with Waiting() as thing:
        await thing.began.wait()
        assert "waiting" in {task.get_name() for task in asyncio.all_tasks()}
    assert thing.cancelled
    assert "waiting" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_task_that_broke_does_not_break_the_end() -> None:
    """Its error was its own to log."""
    async with Waiting(broken=True) as thing:
        await thing.began.wait()


async def test_leaving_without_having_entered() -> None:
    """As when another part fails first."""
    thing = Waiting()
    await thing.__aexit__(None, None, None)
    assert not thing.began.is_set()


async def test_all_tasks_are_ended_whatever_they_end_with() -> None:
    """One that runs, one that fails while it is cancelled, and one that is over; those of a set that shrinks by it."""
    began = asyncio.Event()

    async def wait() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            raise ValueError("while it ended")

    over = asyncio.create_task(asyncio.sleep(0))
    tasks: set[asyncio.Task[None]] = {over, asyncio.create_task(wait()), asyncio.create_task(fail())}
    ended = list(tasks)
    for task in ended:
        task.add_done_callback(tasks.discard)
    await began.wait()
    await cancel_tasks(tasks)
    assert all(task.done() for task in ended)
    await asyncio.sleep(0)
    assert tasks == set()


class Swallowing:
    """A task's work whose library swallows so many cancellations."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.began = asyncio.Event()

    async def run(self) -> None:
        self.began.set()
        while self.left >= 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            self.left -= 1
        raise asyncio.CancelledError


async def test_a_swallowed_cancellation_is_repeated() -> None:
    """As redis-py swallows it while it connects."""
    work = Swallowing(1)
    task = asyncio.create_task(work.run(), name="swallowing")
    await work.began.wait()
    await cancel_tasks([task], again_s=0.001)
    assert task.cancelled()


async def test_a_task_that_never_ends_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """The wait for it is bounded, and the log names it."""
    work = Swallowing(CANCELLATIONS)
    task = asyncio.create_task(work.run(), name="deaf")
    await work.began.wait()
    await cancel_tasks([task], again_s=0.001)
    assert not task.done()
    assert "left behind, since cancelling does not end them: deaf" in caplog.text
    task.cancel()
    await asyncio.wait([task])


async def test_a_cancellation_that_was_swallowed_is_raised_after_the_call() -> None:
    """A task that was not cancelled goes on."""

    async def work() -> None:
        raise_if_cancelled()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise_if_cancelled()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_steps_are_taken_in_slices_of_time() -> None:
    """As many as fit into a slice, then a pause; the result is that of the last one."""
    now, paused = [0.0], list[float]()
    taken: list[list[int]] = [[]]

    def steps() -> Generator[None, None, str]:
        for number in range(7):
            now[0] += 1.0
            taken[-1].append(number)
            yield
        return "all"

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        taken.append([])

    assert await run_in_slices(steps(), slice_s=3.0, clock=lambda: now[0], pause_s=0.5, sleep=sleep) == "all"
    assert taken == [[0, 1, 2], [3, 4, 5], [6]]
    assert paused == [0.5, 0.5]


async def test_a_walk_gives_others_their_turn() -> None:
    """After every slice, whatever an item costs; nothing is left out, and a walk within a slice is not interrupted."""
    now = [0.0]
    seen: list[object] = []

    async def sleep(seconds: float) -> None:
        seen.append(f"others, {seconds:g}")

    async for item in in_slices([1, 1, 5, 1, 1, 1, 1], slice_s=3.0, clock=lambda: now[0], sleep=sleep):
        seen.append(item)
        now[0] += item
    assert seen == [1, 1, 5, "others, 0", 1, 1, 1, "others, 0", 1]


async def test_each_is_asked_and_few_at_once() -> None:
    """Of thousands no more tasks are made than may ask at a time."""
    asking = most = 0

    async def ask(number: int) -> int:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        for _ in range(1 + number % 5):  # not answered in the order of the questions
            await asyncio.sleep(0)
        asking -= 1
        return number

    assert await ask_each(range(100), ask, at_once=7) == list(range(100))
    assert most == 7


async def test_an_error_of_one_is_its_outcome() -> None:
    """The others are asked all the same."""

    async def ask(number: int) -> int:
        if number == 3:
            raise ValueError("no")
        return number

    outcomes = await ask_each(range(5), ask, at_once=2)
    assert [one for one in outcomes if isinstance(one, int)] == [0, 1, 2, 4]
    assert str(outcomes[3]) == "no"
    assert await ask_each((), ask, at_once=2) == []
