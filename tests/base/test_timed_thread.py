"""Blocking calls that may hang."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvproxy.base.timed_thread import TimedThread


async def test_the_answer_and_the_error_come_through() -> None:
    """One call after another, each in a thread that is not ours."""
    thread = TimedThread("t")
    assert await thread.call(threading.get_ident, timeout_s=60) != threading.get_ident()
    assert await thread.call(lambda: None, timeout_s=60) is None
    with pytest.raises(OSError, match="disk full"):
        await thread.call(lambda: _raise(OSError(28, "disk full")), timeout_s=60)


async def test_a_call_that_hangs_is_left_to_itself() -> None:
    """The caller goes on after its timeout; the next call is refused until the thread has come back."""
    thread, go_on = TimedThread("t"), threading.Event()
    try:
        with pytest.raises(TimeoutError):
            await thread.call(go_on.wait, timeout_s=0.01)
        with pytest.raises(OSError, match="still hangs"):
            await thread.call(go_on.wait, timeout_s=60)
    finally:
        go_on.set()
    while True:
        try:
            assert await thread.call(lambda: 7, timeout_s=60) == 7
            break
        except OSError:
            await asyncio.sleep(0.001)


async def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    """The thread's later answer is dropped."""
    thread, go_on = TimedThread("t"), threading.Event()
    task = asyncio.create_task(thread.call(go_on.wait, timeout_s=60), name="caller")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()


def test_a_thread_that_comes_back_after_the_loop_ended() -> None:
    """It finds no waiter, and ends quietly."""
    thread, go_on = TimedThread("t"), threading.Event()

    async def hang() -> None:
        with pytest.raises(TimeoutError):
            await thread.call(go_on.wait, timeout_s=0.01)

    asyncio.run(hang())
    before = time.monotonic()
    go_on.set()
    while any(one.name == "t" for one in threading.enumerate()):
        assert time.monotonic() - before < 60
        time.sleep(0.001)


def _raise(error: Exception) -> None:
    raise error
