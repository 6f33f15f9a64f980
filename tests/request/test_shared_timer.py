"""One loop timer for many waits of the same length."""

from __future__ import annotations

import asyncio

from kvproxy.request.body import SharedTimer


class Due:
    """What came due, in order; `all_of` waits for so many."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._came = asyncio.Event()

    def __call__(self, key: str) -> None:
        self.keys.append(key)
        self._came.set()

    async def all_of(self, count: int) -> list[str]:
        async with asyncio.timeout(60):
            while len(self.keys) < count:
                self._came.clear()
                await self._came.wait()
        return self.keys


async def test_each_comes_due_in_its_order() -> None:
    """Those added while the timer runs are not forgotten."""
    due = Due()
    timer = SharedTimer(0.005, due)
    timer.add("a")
    await asyncio.sleep(0.002)
    timer.add("b")
    timer.add("c")
    assert await due.all_of(3) == ["a", "b", "c"]
    timer.add("d")
    assert await due.all_of(4) == ["a", "b", "c", "d"]


async def test_what_is_removed_never_comes_due() -> None:
    """And removing says whether it was still waited for."""
    due = Due()
    timer = SharedTimer(0.003, due)
    timer.add("a")
    timer.add("b")
    assert timer.remove("a")
    assert not timer.remove("a")
    assert await due.all_of(1) == ["b"]
    assert not timer.remove("b")


async def test_a_key_may_be_removed_by_the_one_before_it() -> None:
    """When several are due in one look, each call may change what is waited for."""
    came: list[str] = []
    done = asyncio.Event()

    def on_due(key: str) -> None:
        came.append(key)
        timer.remove("b")
        done.set()

    timer: SharedTimer[str] = SharedTimer(0.003, on_due)
    timer.add("a")
    timer.add("b")
    await done.wait()
    await asyncio.sleep(0.01)
    assert came == ["a"]
