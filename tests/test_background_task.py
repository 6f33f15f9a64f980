"""The one background task of a thing."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from kvproxy.base.background_task import BackgroundTask, cancel_tasks, run_in_slices


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
