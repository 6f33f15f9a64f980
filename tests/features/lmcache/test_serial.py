"""One call at a time per instance."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvproxy.base.errors import TooManyWaiting
from kvproxy.features.lmcache.controller import KeyedLock
from tests.support.until import until


class Calls:
    """Calls under a lock that last until released; counts how many run at once."""

    def __init__(self, lock: KeyedLock) -> None:
        self.lock = lock
        self.release = asyncio.Event()
        self.running: list[str] = []
        self.most = 0
        self.order: list[str] = []

    async def __call__(self, name: str, *keys: str) -> None:
        async with self.lock.hold_keys(*keys):
            self.running.append(name)
            self.most = max(self.most, len(self.running))
            await self.release.wait()
            self.running.remove(name)
            self.order.append(name)


def waiting(lock: KeyedLock, key: str) -> int:
    """Return the number of callers in line for a key that is held."""
    return lock._lines[key].callers - 1 if key in lock._lines else 0


async def test_one_key_is_held_by_one_caller_in_order_of_arrival() -> None:
    """The controller's socket sees calls strictly one after another."""
    calls = Calls(KeyedLock())
    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(calls(name, "vllm-a"))
        await until(lambda: waiting(calls.lock, "vllm-a") == 2)
        calls.release.set()
    assert calls.order == ["a", "b", "c"]
    assert calls.most == 1


async def test_other_keys_are_not_held_up() -> None:
    """A hanging instance delays only itself."""
    calls = Calls(KeyedLock())
    async with asyncio.TaskGroup() as group:
        group.create_task(calls("a", "vllm-a"))
        group.create_task(calls("b", "vllm-b"))
        await until(lambda: calls.most == 2)
        calls.release.set()


async def test_a_full_line_refuses_at_once() -> None:
    """The line is bounded: no call waits behind sixteen others."""
    calls = Calls(KeyedLock(max_waiting=1))
    async with asyncio.TaskGroup() as group:
        group.create_task(calls("a", "k"))
        group.create_task(calls("b", "k"))
        await until(lambda: waiting(calls.lock, "k") == 1)
        with pytest.raises(TooManyWaiting, match="k"):
            await calls("c", "k")
        assert waiting(calls.lock, "k") == 1
        calls.release.set()
    assert calls.order == ["a", "b"]
    assert "k" not in calls.lock._lines
    async with asyncio.timeout(60):
        await calls("d", "k")


async def test_a_caller_that_gives_up_leaves_the_line() -> None:
    """Cancellation in the line frees the place, in the call the lock; nothing is kept for an idle key."""
    lock = KeyedLock(max_waiting=1)
    calls = Calls(lock)
    holder = asyncio.create_task(calls("a", "k"))
    waiter = asyncio.create_task(calls("b", "k"))
    await until(lambda: waiting(lock, "k") == 1)
    for task in (waiter, holder):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert "k" not in lock._lines
    assert not lock._lines
    async with lock.hold_keys("k"):
        pass


async def test_two_keys_are_taken_in_one_order() -> None:
    """Two moves in opposite directions cannot wait for each other, nor one within an instance for itself."""
    calls = Calls(KeyedLock())
    calls.release.set()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(calls("ab", "a", "b"))
            group.create_task(calls("ba", "b", "a"))
            group.create_task(calls("aa", "a", "a"))
    assert calls.most == 1
