"""Notices that the client left, and cancels the request's work at once."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from kvproxy.request.body import SharedTimer
from kvproxy.types import CONNECTION, ClientConnection

#: Most unary replies are over by then and need no watcher (a task waiting on `receive` costs 11 us).
ARM_DELAY_S = 0.02

#: Where armed watchers wait for their delay to pass.
Arming = SharedTimer["DisconnectWatcher"]


def new_arming(delay_s: float = ARM_DELAY_S) -> Arming:
    """One for all requests of a router."""
    return SharedTimer(delay_s, DisconnectWatcher.start)


class DisconnectWatcher:
    """Cancels the task it was armed in when the client is gone: our listener tells it, under another `receive` does.

    The request body must have been read before arming. Works like `asyncio.timeout`: the task that catches the
    cancellation asks `caused_cancellation()` whether it was this watcher's, and re-raises it otherwise.
    """

    __slots__ = ("_arming", "_connection", "_receive", "_task", "_watch", "gone")

    def __init__(self, scope: Scope, receive: Receive, arming: Arming) -> None:
        self._connection: ClientConnection | None = scope.get(CONNECTION)
        self._receive = receive
        self._arming = arming
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.gone = False

    def arm(self, task: asyncio.Task[object] | None = None) -> None:
        """Start watching on behalf of this task; None: the current one."""
        self._task = task or asyncio.current_task()
        if self._connection is not None:
            self._connection.on_disconnect(self._left)
        else:
            self._arming.add(self)

    def disarm(self) -> None:
        """Stop watching; nothing is cancelled from here on."""
        if self._connection is not None:
            self._connection.on_disconnect(None)
        elif self._watch is not None:
            self._watch.cancel()
        else:
            self._arming.remove(self)

    def caused_cancellation(self) -> bool:
        """Whether the cancellation just caught came from here and from nowhere else."""
        return self.gone and self._task is not None and self._task.uncancel() == 0

    def start(self) -> None:
        """Wait for the disconnect message from now on."""
        self._watch = asyncio.get_running_loop().create_task(self._wait(), name="disconnect watcher")

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._left()

    def _left(self) -> None:
        self.gone = True
        assert self._task is not None
        self._task.cancel()
