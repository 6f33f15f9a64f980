"""One response on its way through: head first, then whatever has arrived so far, until the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvproxy.types import Headers


class Source(Protocol):
    """The connection a response still comes from."""

    def take(self) -> bytes | None:
        """The body that arrived, None when there is none yet."""
        ...

    def cancel(self) -> None:
        """Give the response up and close the connection."""
        ...


class UpstreamResponse:
    """`status`, `headers` (lower-case names) and `reason` are there once `UpstreamPool.request` returned it.

    One reader at a time; one that does not read to the end calls `abort()`.
    """

    __slots__ = (
        "_complete", "_error", "_loop", "_rest", "_source", "_waiter", "headers", "on_piece", "reason", "status",
    )  # fmt: skip

    def __init__(self, source: Source, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: Headers = []
        self.reason = b""
        #: Called when a part of the body arrives while the reader waits in `chunk`; it may `take` it and return True,
        #: and then the reader goes on waiting. It must not raise.
        self.on_piece: Callable[[], bool] | None = None
        self._source: Source | None = source
        self._loop = loop  # asking for it costs a system call (getpid)
        self._complete = False
        self._error: BaseException | None = None
        self._rest = b""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def complete(self) -> bool:
        """The whole response arrived (its last bytes may still wait to be taken); the connection is given back."""
        return self._complete

    def take(self) -> bytes | None:
        """What has arrived and was not taken yet, b"" after the end, None when `chunk()` would have to wait.

        Raises what ended the response too early (kvproxy.errors), after everything that came before it was taken.
        """
        if self._source is not None:
            return self._source.take()
        rest = self._rest
        if rest:
            self._rest = b""
        elif self._error is not None:
            raise self._error
        return rest

    async def chunk(self) -> bytes:
        """Like `take`, but waits for the next bytes or the end."""
        while (data := self.take()) is None:
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return data

    async def started(self) -> None:
        """Waits for the head. Raises what came instead of it."""
        while not self.status:
            if self._error is not None:
                raise self._error
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None

    def abort(self) -> None:
        """Tells upstream at once by closing the connection, unless the response is complete."""
        if self._source is not None:
            self._source.cancel()

    # called by the connection

    def arrived(self) -> None:
        """A part of the body is there."""
        if self._waiter is None or self.on_piece is None or not self.on_piece():
            self.wake()

    def finish(self, rest: bytes) -> None:
        """The end is there; `rest` is what was not taken yet. The source is let go."""
        self._source = None
        self._rest = rest
        self._complete = True
        self.wake()

    def fail(self, error: BaseException, *, rest: bytes) -> None:
        """The end will not come. The source is let go."""
        self._source = None
        self._rest = rest
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Something changed for a waiting reader."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
