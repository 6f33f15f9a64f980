"""Waiting for something another task does, without guessing how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Returns as soon as `condition()` is true; TimeoutError when it never becomes so."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition is other code's state: there is no event to wait for
            await asyncio.sleep(0.002)
