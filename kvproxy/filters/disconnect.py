"""Notices that the client left, and cancels the request's work at once."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

#: Most unary replies are over by then and need no watcher (a task waiting on `receive` costs 11 us).
ARM_DELAY_S = 0.02


class DisconnectWatcher:
    """Cancels the task it was armed in when `receive` says the client is gone.

    The request body must have been read before arming. Works like `asyncio.timeout`: the task that catches the
    cancellation asks `claims()` whether it was this watcher's, and re-raises it otherwise.
    """

    __slots__ = ("_receive", "_task", "_timer", "_watch", "gone")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self.gone = False

    def arm(self, *, delay_s: float = ARM_DELAY_S) -> None:
        """Start watching `delay_s` from now, on behalf of the current task."""
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._start)

    def disarm(self) -> None:
        """Stop watching; nothing is cancelled from here on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def claims(self) -> bool:
        """Whether the cancellation just caught came from here and from nobody else."""
        return self.gone and self._task is not None and self._task.uncancel() == 0

    def _start(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._wait(), name="disconnect watcher")

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self.gone = True
        assert self._task is not None
        self._task.cancel()
