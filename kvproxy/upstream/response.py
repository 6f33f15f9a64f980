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
        "_loop", "_rest", "_source", "complete", "early", "error", "headers", "on_piece", "reason", "status", "waiter",
    )  # fmt: skip

    def __init__(self, source: Source, loop: asyncio.AbstractEventLoop, *, early: bool = True) -> None:
        self.status = 0
        self.headers: Headers = []
        self.reason = b""
        #: The reader is woken by the head alone, not only by what follows it.
        self.early = early
        #: The whole response arrived (its last bytes may still wait to be taken); the connection is given back.
        self.complete = False
        #: Called with a part of the body that arrives while the reader waits; True: it went on, and the reader goes on
        #: waiting; False: it is to be taken. It must not raise.
        self.on_piece: Callable[[bytes], bool] | None = None
        self._source: Source | None = source
        self._loop = loop  # asking for it costs a system call (getpid)
        self.error: BaseException | None = None  # what came in place of the end
        self._rest = b""
        self.waiter: asyncio.Future[None] | None = None  # done: the reader is woken, or gave up

    def take(self) -> bytes | None:
        """What has arrived and was not taken yet, b"" after the end, None when `chunk()` would have to wait.

        Raises what ended the response too early (kvproxy.errors), after everything that came before it was taken.
        """
        if self._source is not None:
            return self._source.take()
        rest = self._rest
        if rest:
            self._rest = b""
        elif self.error is not None:
            raise self.error
        return rest

    async def chunk(self) -> bytes:
        """Like `take`, but waits for the next bytes or the end."""
        while (data := self.take()) is None:
            await self.changed()
        return data

    def changed(self) -> asyncio.Future[None]:
        """Done when something has arrived, or the end; a future and no coroutine, which would be resumed as well."""
        self.waiter = waiter = self._loop.create_future()
        return waiter

    def abort(self) -> None:
        """Tells upstream at once by closing the connection, unless the response is complete."""
        if self._source is not None:
            self._source.cancel()

    # called by the connection

    def finish(self, rest: bytes) -> None:
        """The end is there; `rest` is what was not taken yet. The source is let go."""
        self._source = None
        self._rest = rest
        self.complete = True
        self.wake()

    def fail(self, error: BaseException, *, rest: bytes) -> None:
        """The end will not come. The source is let go."""
        self._source = None
        self._rest = rest
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Something changed for a waiting reader."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
