"""One loop timer for many waits of the same length."""

from __future__ import annotations

from kvproxy.proxy.request.body import SharedTimer
from tests.support.loop_time import skipping_time


async def test_each_comes_due_in_its_order() -> None:
    """Each after its own full time; those added while the timer runs are not forgotten."""
    came: list[str] = []
    timer = SharedTimer(100.0, came.append)
    with skipping_time() as skip:
        timer.add("a")
        await skip(40.0)
        timer.add("b")
        timer.add("c")
        await skip(40.0)
        assert came == []
        await skip(40.0)
        assert came == ["a"]
        await skip(40.0)
        assert came == ["a", "b", "c"]
        timer.add("d")
        await skip(140.0)
    assert came == ["a", "b", "c", "d"]


async def test_removed_entries_never_come_due() -> None:
    """And removing says whether it was still waited for."""
    came: list[str] = []
    timer = SharedTimer(100.0, came.append)
    with skipping_time() as skip:
        timer.add("a")
        timer.add("b")
        assert timer.remove("a")
        assert not timer.remove("a")
        await skip(140.0)
        assert came == ["b"]
        assert not timer.remove("b")


async def test_a_key_may_be_removed_by_the_one_before_it() -> None:
    """When several are due in one look, each call may change what is waited for."""
    came: list[str] = []

    def on_due(key: str) -> None:
        came.append(key)
        timer.remove("b")

    timer: SharedTimer[str] = SharedTimer(100.0, on_due)
    with skipping_time() as skip:
        timer.add("a")
        timer.add("b")
        await skip(140.0)
        await skip(140.0)
    assert came == ["a"]
