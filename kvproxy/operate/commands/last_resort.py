"""The bound on the end of the process, whatever hangs by then."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Self

from kvproxy.base.types import Clock

logger = logging.getLogger("kvproxy")

#: What still runs after the drain has this long to end; longer than a disk that hangs holds up the last write.
END_GRACE_S = 15.0
#: After that only threads of libraries are left, which get this long.
_THREADS_S = 3.0
#: The log is written by another thread.
_LOG_S = 0.2


class LastResort:
    """Ends the process if its orderly end takes too long, by a thread that neither the event loop nor a library nor a
    dead mount holds up. Leaving calls it off."""

    def __init__(self, *, exit_process: Callable[[int], object] = os._exit, clock: Clock = time.monotonic) -> None:
        self._exit = exit_process
        self._clock = clock
        #: A deadline and the exit status, or None. Its `put` may interrupt itself, as signal handlers require.
        self._orders: queue.SimpleQueue[tuple[float, int] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="last resort", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.put(None)

    def watch_loop(self) -> None:
        """Name the tasks of the running loop when they outlive the deadline."""
        self._loop = asyncio.get_running_loop()

    def end_within(self, limit_s: float, status: int = 1) -> None:
        """Exit with this status so many seconds from now. The earliest deadline counts."""
        self._orders.put((self._clock() + limit_s, status))

    def end_threads(self, status: int) -> None:
        """Exit with this status although threads hang: everything else has ended."""
        self.end_within(_THREADS_S, status)

    def _run(self) -> None:
        deadline = self._orders.get()
        while deadline is not None and (left_s := deadline[0] - self._clock()) > 0:
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=left_s)
                deadline = None if order is None else min(deadline, order)
        if deadline is not None:
            reporting = threading.Thread(target=self._report, name="last words", daemon=True)
            reporting.start()  # in a thread as well: the log may be what hangs
            reporting.join(2 * _LOG_S)
            self._exit(deadline[1])

    def _report(self) -> None:
        tasks: set[asyncio.Task[object]] = set()
        with contextlib.suppress(RuntimeError):  # threads come and go meanwhile
            tasks = set() if self._loop is None else asyncio.all_tasks(self._loop)
        named = sorted({f"task {task.get_name()!r}" for task in tasks if not task.get_name().startswith("Task-")})
        named += [f"thread {one.name!r}" for one in threading.enumerate() if not one.daemon]
        logger.error("the process ends now although these still run: %s", ", ".join(named))
        time.sleep(_LOG_S)
