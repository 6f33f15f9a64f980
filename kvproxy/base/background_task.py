"""Background tasks: the end of some, work in slices, and what owns one task, or several that come and go, inside an
`async with`."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Self, TypeVar

S = TypeVar("S")
T = TypeVar("T")


log = logging.getLogger(__name__)

#: A task that swallowed its cancellation is cancelled again at this interval and this often, then left behind.
CANCEL_AGAIN_S = 2.0
CANCELLATIONS = 3

#: How long a walk over all endpoints, or over all series, holds the event loop at a time.
SLICE_S = 0.0005


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]], *, again_s: float = CANCEL_AGAIN_S) -> None:
    """Cancel all of them and wait for their ends, whatever these are. Libraries may swallow a cancellation: a task that
    goes on is cancelled again, and in the end left behind with a line in the log."""
    ending = set(tasks)
    for _ in range(CANCELLATIONS):
        if not ending:
            return
        for task in ending:
            task.cancel()
        done, ending = await asyncio.wait(ending, timeout=again_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # read, so that it is not reported as lost
    if ending:
        log.error("left behind, since cancelling does not end them: %s", ", ".join(map(asyncio.Task.get_name, ending)))


def find_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop. RuntimeError, in a sentence, if there is none of asyncio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("kvproxy runs on asyncio alone, and no event loop of asyncio runs here") from None


def raise_if_cancelled() -> None:
    """Raise the cancellation of the running task that a library swallowed, if there is one."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def run_in_slices(
    steps: Generator[None, None, T],
    *,
    slice_s: float,
    clock: Callable[[], float],
    pause_s: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Return the result of all the steps: they hold the event loop for `slice_s` at a time, and the last of these for
    as long as it takes; then the loop is left alone for `pause_s`, at least for a turn."""
    while True:
        until = clock() + slice_s
        try:
            while clock() < until:
                next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        await sleep(pause_s)


async def in_slices(
    items: Iterable[T],
    *,
    slice_s: float = SLICE_S,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[T]:
    """Yield the items for a walk that may be long: whenever it has held the event loop for `slice_s`, others have their
    turn before the next item. Items of a collection that may change meanwhile are to be copied first."""
    until = clock() + slice_s
    for item in items:
        yield item
        if clock() >= until:
            await sleep(0)
            until = clock() + slice_s


async def ask_each(items: Sequence[S], ask: Callable[[S], Awaitable[T]], *, at_once: int) -> list[T | Exception]:
    """Return what `ask` of every item returns or raises, in their order; `at_once` of them are asked at a time."""
    outcomes: list[T | Exception] = [LookupError("not asked")] * len(items)
    left = iter(enumerate(items))

    async def ask_in_turn() -> None:
        for number, item in left:
            try:
                outcomes[number] = await ask(item)
            except Exception as error:  # noqa: BLE001 - the caller's; the others are asked all the same
                outcomes[number] = error
            await asyncio.sleep(0)  # also where nothing had to be waited for

    async with asyncio.TaskGroup() as group:
        async for _ in in_slices(range(min(at_once, len(items)))):
            group.create_task(ask_in_turn())
    return outcomes


class TaskSet:
    """Tasks that come and go. Leaving cancels and awaits those that are left, cancelled ones included."""

    def __init__(self) -> None:
        self.running = False  # entered, and not left
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.running = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running = False
        await cancel_tasks(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Only while running. To end the task, cancel it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class BackgroundTask(ABC):
    """Runs `_run` as a task named `task_name` from entering to leaving; there it is cancelled and awaited, in spite of
    any error."""

    task_name: str
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=self.task_name)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await cancel_tasks([self._task])

    @abstractmethod
    async def _run(self) -> None: ...
