"""Waiting for something another task or another program does, without guessing how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Seen = TypeVar("_Seen")


async def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Return as soon as `condition()` is true; TimeoutError when it never becomes so."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition is other code's state: there is no event to wait for
            await asyncio.sleep(0.002)


async def until_says(
    wanted: _Seen, ask: Callable[[], Awaitable[_Seen]], *, within_s: float = 60.0, pause_s: float = 0.02
) -> None:
    """Return as soon as another program, polled repeatedly, answers as wanted; AssertionError with its last answer if
    it never does."""
    seen: _Seen | None = None
    try:
        async with asyncio.timeout(within_s):
            while (seen := await ask()) != wanted:  # noqa: ASYNC110 - another program: there is no event to wait for
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise AssertionError(f"after {within_s:.0f} s the answer is {seen}, not {wanted}") from None
