"""Blocking calls away from the event loop, where a dead mount or a slow resolver holds up neither requests nor the end
of the process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class TimedThread:
    """Blocking calls, one at a time, each in a daemon thread of its own: one that hangs is left to itself, takes no
    thread of others, and does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False

    async def call(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """Return what `work` answers or raises. OSError (a TimeoutError at first) while an earlier call still hangs."""
        if self._busy:
            raise OSError(errno.EBUSY, "an earlier call still hangs")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def hand_over(result: T | None, error: BaseException | None) -> None:
            if answer.done():  # the call was given up
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]  # T may be None

        def run() -> None:
            result = None
            raised = None
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                raised = error
            self._busy = False
            with contextlib.suppress(RuntimeError):  # the loop ended while it hung
                loop.call_soon_threadsafe(hand_over, result, raised)

        self._busy = True
        threading.Thread(target=run, name=self._name, daemon=True).start()
        async with asyncio.timeout(timeout_s):
            return await answer


def read_file(path: str | Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a regular file, at most one more than `max_bytes`. OSError for anything else: a pipe or a
    device may never return them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(max_bytes + 1)
