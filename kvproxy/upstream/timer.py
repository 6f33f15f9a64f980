"""Notices silence: one timer for the life of a connection, moved by writing down a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Calls `on_silence` once nothing was heard for the limit; `start`, `touch` and `stop` cost no timer of the loop.

    A pending loop timer is kept across requests and looks again when it fires, since arming and cancelling one for
    every request costs more than the rest of the bookkeeping together.
    """

    __slots__ = ("_handle", "_last", "_limit_s", "_loop", "_on_silence")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_silence: Callable[[], None]) -> None:
        self._loop = loop
        self._on_silence = on_silence
        self._limit_s = 0.0
        self._last = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self, limit_s: float) -> None:
        """Silence is counted from now; 0 stops."""
        self._limit_s = limit_s
        if not limit_s:
            return
        self._last = self._loop.time()
        due = self._last + limit_s
        if self._handle is not None:
            if self._handle.when() <= due:
                return
            self._handle.cancel()
        self._handle = self._loop.call_at(due, self._fire)

    def touch(self) -> None:
        """Something was heard."""
        self._last = self._loop.time()

    def stop(self) -> None:
        """Silence is no longer counted."""
        self._limit_s = 0.0

    def close(self) -> None:
        """Gives the pending loop timer back."""
        self._limit_s = 0.0
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        if not self._limit_s:
            return
        due = self._last + self._limit_s
        if due > self._loop.time():
            self._handle = self._loop.call_at(due, self._fire)
            return
        self._limit_s = 0.0
        self._on_silence()
