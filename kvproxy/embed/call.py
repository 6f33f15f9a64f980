"""One request of a client of httpx or httpx2, as the proxy sees its client: plain calls, and ASGI's receive and
send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Scope

from kvproxy.base.types import CONNECTION, Headers
from kvproxy.proxy.request.body import SharedTimer

log = logging.getLogger("kvproxy")

#: Pieces of an answer that its reader has not taken; beyond this the engine's connection is paused.
HIGH_WATER_BYTES = 64 * 1024
_BROKEN_OFF = "the engine closed its connection before the answer was complete"


class Call(msgspec.Struct, eq=False):
    """The request and its answer. Implements ClientConnection for the proxy; `head`, `next_piece` and `leave` are for
    the client. Keeps no scope: that keeps the call."""

    loop: asyncio.AbstractEventLoop
    _library: Any  # the client's, httpx or httpx2: errors are of its types
    _body: bytes | AsyncIterator[bytes]  # whole, or as made by the client's own code
    _limit: SharedTimer[Call] | None = None  # of each wait for the engine
    writable: bool = True
    status: int = 0
    headers: Headers = []
    complete: bool = False  # the answer ended
    disconnected: bool = False  # the answer has no reader any more
    failure: Exception | None = None  # raised to the reader behind the earlier pieces
    task: asyncio.Task[None] | None = None
    _body_given: bool = False
    _pieces: list[bytes] = []
    _held_bytes: int = 0
    _reader: asyncio.Future[None] | None = None  # waits for more of the answer
    _writer: asyncio.Future[None] | None = None  # waits for the reader to take pieces
    _gone: asyncio.Future[None] | None = None  # waits for the reader to leave
    on_disconnect: Callable[[], None] | None = None

    def begin(self, app: ASGIApp, scope: Scope, *, among: set[Call]) -> None:
        """Let the proxy answer; the call is `among` those that run until then."""
        scope[CONNECTION] = self
        among.add(self)
        self.task = self.loop.create_task(self._run(app, scope, among), name="request of an httpx client")

    async def _run(self, app: ASGIApp, scope: Scope, among: set[Call]) -> None:
        try:
            await app(scope, self.receive, self.send)
            if not self.complete and self.failure is None:
                self.failure = self._library.RemoteProtocolError(_BROKEN_OFF)
        except asyncio.CancelledError:
            self.failure = self._library.RemoteProtocolError("kvproxy was closed before the answer was complete")
        except Exception as error:
            log.exception("a request of an httpx client failed")
            self.failure = self._library.RemoteProtocolError(f"kvproxy failed: {type(error).__name__}")
        finally:
            among.discard(self)  # here, since a done callback costs another turn of the loop
            self.on_disconnect = None
            _wake(self._reader)

    # for the client

    async def head(self) -> int:
        """Return the status of the answer. Raises httpx's exceptions, and whatever the client's own body raised."""
        while not self.status:
            if self.failure is not None:
                raise self.failure
            await self._more()
        return self.status

    async def next_piece(self) -> bytes:
        """Return all of the answer that is there and was not taken yet; b"" at its end. Raises httpx's exceptions."""
        while not self._pieces:
            if self.complete:
                return b""
            if self.failure is not None:
                raise self.failure
            await self._more()
        return self.take()

    def take(self) -> bytes:
        """Return the arrived pieces."""
        pieces = self._pieces
        self._pieces = []
        self._held_bytes = 0
        if not self.writable:
            self.writable = True
            _wake(self._writer)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def leave(self) -> None:
        """Leave: the answer has no reader any longer, so the engine stops."""
        if self.disconnected or self.complete:
            return
        self.disconnected = True
        self.writable = True
        self._pieces = []
        _wake(self._writer)
        _wake(self._gone)
        if self.on_disconnect is not None:
            self.on_disconnect()

    async def _more(self) -> None:
        reader = self._reader = self.loop.create_future()
        if self._limit is not None:
            self._limit.add(self)
        try:
            await reader
        finally:
            self._reader = None
            if self._limit is not None:
                self._limit.remove(self)

    def late(self) -> None:
        """Raise to the reader that the engine sent nothing in time."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(self._library.ReadTimeout("the engine sent nothing in time"))

    def take_body(self) -> bytes | None:
        body = self._body
        if not isinstance(body, bytes) or self._body_given or self.disconnected:
            return None
        self._body_given = True
        return body

    def start(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], first_piece: bytes = b"", *, more: bool
    ) -> None:
        if self.disconnected:
            return
        if self.status:
            raise RuntimeError("the response has started already")
        self.headers = list(headers)
        self.status = status
        self.write(first_piece, more=more)

    def write(self, piece: bytes, *, more: bool) -> None:
        if self.disconnected:
            return
        if self.complete or not self.status:
            raise RuntimeError("the response is complete" if self.complete else "the response has no head")
        if piece:
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            if self._held_bytes > HIGH_WATER_BYTES:
                self.writable = False
        self.complete = not more
        _wake(self._reader)

    async def drain(self) -> None:
        while not self.writable:
            self._writer = self.loop.create_future()
            await self._writer

    # ASGI

    async def receive(self) -> dict[str, Any]:
        if not self._body_given and not self.disconnected:
            piece = self.take_body() if isinstance(self._body, bytes) else await self._uploaded(self._body)
            if piece is not None:
                return {"type": "http.request", "body": piece, "more_body": not self._body_given}
        while not self.disconnected and not self.complete:
            self._gone = self.loop.create_future()
            await self._gone
        return {"type": "http.disconnect"}

    async def _uploaded(self, pieces: AsyncIterator[bytes]) -> bytes | None:
        """Return the next piece of the client's body; None if the client's own code failed to give one. Time that the
        client takes is not the engine's."""
        if self._limit is not None:
            self._limit.remove(self)
        try:
            return await anext(pieces)
        except StopAsyncIteration:
            self._body_given = True
            return b""
        except Exception as error:  # noqa: BLE001 - the client's own code: it is raised to its caller
            self.failure = error
            _wake(self._reader)
            self.leave()
            return None
        finally:
            if self._limit is not None and self._reader is not None:
                self._limit.remove(self)
                self._limit.add(self)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if not self.disconnected and self.status:
                raise RuntimeError("the response has started already")
            self.headers = list(message.get("headers", ()))
            self.status = message["status"]
            _wake(self._reader)
            return
        if not self.writable:
            await self.drain()
        self.write(message.get("body", b""), more=message.get("more_body", False))


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
