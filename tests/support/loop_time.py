"""The running event loop's time, moved on by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import pytest

#: Of a test that skips time, in a room that also runs on uvloop.
ASYNCIO_ONLY = pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])


@contextlib.contextmanager
def skipping_time() -> Iterator[Callable[[float], Awaitable[None]]]:
    """Inside the block, awaiting what is given lets so many seconds of the loop's time pass at once, and what is due
    then happen; in between it runs as ever. A limit of half a minute is then met, or missed by far, whatever the
    machine does. For asyncio's own loop only: uvloop keeps its time to itself.
    """
    loop = asyncio.get_running_loop()
    real_time, skipped_s = loop.time, 0.0

    async def skip(seconds: float) -> None:
        nonlocal skipped_s
        skipped_s += seconds
        for _ in range(2):  # timers that are due run in the loop's next turn, behind what was ready before
            await asyncio.sleep(0)

    loop.time = lambda: real_time() + skipped_s  # type: ignore[method-assign]
    try:
        yield skip
    finally:
        del loop.time
