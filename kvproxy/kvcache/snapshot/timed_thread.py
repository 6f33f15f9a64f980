"""Blocking calls in a daemon thread of their own: a disk that hangs delays neither requests nor the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimedThread:
    """One call at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False

    async def call(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """What `work` answers or raises. OSError (a TimeoutError at first) while an earlier call still hangs."""
        if self._busy:
            raise OSError(errno.EBUSY, "an earlier call still hangs")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():  # nobody waits any more
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]  # T may be None

        def run() -> None:
            result, raised = None, None
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                raised = error
            self._busy = False
            with contextlib.suppress(RuntimeError):  # the loop ended while it hung
                loop.call_soon_threadsafe(settle, result, raised)

        self._busy = True
        threading.Thread(target=run, name=self._name, daemon=True).start()
        async with asyncio.timeout(timeout_s):
            return await answer
