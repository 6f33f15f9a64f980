"""One connection to an engine: a request out, its response in, then the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, cast

from kvproxy.base.errors import (
    FirstByteTimeout,
    IdleTimeout,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamProtocolError,
)
from kvproxy.base.socket_writes import write_pieces
from kvproxy.base.upstream.request import WireRequest, send_body
from kvproxy.base.upstream.response import ResponseParser, UpstreamResponse

#: After a read of this size there is most likely more to read.
_FULL_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; 0 is none. `first_byte_s` runs from the request sent to the first body byte, `idle_s` between pieces."""

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0


class Owner(Protocol):
    """The pool a connection belongs to."""

    def release(self, connection: Connection) -> None:
        """Take back a connection at a message boundary; it may serve another request."""
        ...

    def retire(self, connection: Connection) -> None:
        """Take back a connection that will serve no other request."""
        ...

    def lost(self, connection: Connection) -> None:
        """Its socket is gone."""
        ...


class IdleTimer:
    """Timer that calls `on_idle` after the limit without data; `start`, `stop` and a new `last` cost no timer of the
    loop.

    A pending loop timer is kept across requests and looks again when it fires, since arming and cancelling one for
    every request costs more than the rest of the bookkeeping together."""

    __slots__ = ("_handle", "_limit_s", "_loop", "_on_idle", "last")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_idle: Callable[[], None]) -> None:
        self._loop = loop
        self._on_idle = on_idle
        #: Loop time when data last arrived; set by the connection.
        self.last = 0.0
        self._limit_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self, limit_s: float) -> None:
        """Silence is counted from now; 0 stops."""
        self._limit_s = limit_s
        if not limit_s:
            return
        self.last = self._loop.time()
        due = self.last + limit_s
        if self._handle is not None:
            if self._handle.when() <= due:
                return
            self._handle.cancel()
        self._handle = self._loop.call_at(due, self._fire)

    def stop(self) -> None:
        """Silence is no longer counted."""
        self._limit_s = 0.0

    def close(self) -> None:
        """Give the pending loop timer back."""
        self._limit_s = 0.0
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        if not self._limit_s:
            return
        due = self.last + self._limit_s
        if due > self._loop.time():
            self._handle = self._loop.call_at(due, self._fire)
            return
        self._limit_s = 0.0
        self._on_idle()


class Connection(asyncio.Protocol):
    """The asyncio protocol of one upstream connection. Nothing here waits except `write`."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        high_water_bytes: int,
        uploads: set[asyncio.Task[None]] | None = None,
    ) -> None:
        self.closed = False  # takes no further request: closing, closed, or announced by the peer
        self.lost = False  # the socket is gone
        self.owner: Owner | None = None
        self._loop = loop
        # tasks of all connections while they run
        self._uploads = set[asyncio.Task[None]]() if uploads is None else uploads
        self._high_water_bytes = high_water_bytes
        self._parser = ResponseParser()
        self._timer = IdleTimer(loop, self._timed_out)
        self._response: UpstreamResponse | None = None
        self._timeouts = Timeouts()
        self._streaming = False  # the first body byte came
        self._buffered_bytes = 0
        self._reading_paused = False
        self._writable: asyncio.Future[None] | None = None  # while the transport is paused
        self._upload: asyncio.Task[None] | None = None  # until all of the body is written
        self._transport: asyncio.Transport

    @property
    def heard(self) -> bool:
        """Any byte came in answer to the present request."""
        return self._parser.heard

    def send(
        self,
        request: WireRequest,
        timeouts: Timeouts,
        *,
        early: bool = True,
        on_head: Callable[[UpstreamResponse], None] | None = None,
    ) -> UpstreamResponse:
        """Send a request, the part of its body that is not there yet while the response may already come. `early` and
        `on_head`: as of the response."""
        self._parser.expect_response(request.method)
        self._timeouts = timeouts
        self._streaming = False
        self._buffered_bytes = 0
        self._response = response = UpstreamResponse(self, self._loop, early=early, on_head=on_head)
        buffers = request.buffers
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            write_pieces(self._transport, buffers)
        body = request.upload() if request.body is not None else None
        if body is None:
            self._timer.start(timeouts.first_byte_s)
        else:  # the timer starts when the request is sent: until then the client may be the slow one
            self._timer.stop()
            upload = self._loop.create_task(self._send_body(body, request.length_bytes), name="upstream upload")
            self._upload = upload
            self._uploads.add(upload)
            upload.add_done_callback(self._upload_done)
        return response

    async def write(self, data: bytes | memoryview) -> None:
        """Write once the engine takes more; it has the first-byte timeout to do so."""
        if self._writable is not None:
            if not self._streaming:
                self._timer.start(self._timeouts.first_byte_s)
            await self._writable
            if not self._streaming:
                self._timer.stop()
        if self.closed:
            raise UpstreamDisconnected("closed while the request was being sent")
        self._transport.write(data)

    def take(self) -> bytes | None:
        """Return the body that arrived; reading goes on if a slow reader had stopped it."""
        body = self._parser.body
        if not body:
            return None
        self._buffered_bytes = 0
        if self._reading_paused:
            self._resume_reading()
            self._timer.start(self._timeouts.idle_s)
        data = b"".join(body)  # a single piece is not copied
        body.clear()
        return data

    def cancel(self) -> None:
        """Give the response up and closes at once."""
        self._fail(UpstreamDisconnected("given up by the proxy"))

    def close(self) -> None:
        """Close at once; a reader that waits for a response gets UpstreamDisconnected."""
        self.cancel()
        self._shut()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # unsolicited bytes could not be distinguished from the next response
            self._shut()
            return
        parser = self._parser
        try:
            parser.feed(data)
        except UpstreamProtocolError as error:
            self._fail(error)
            return
        if not response.status and parser.head_complete:
            response.status = parser.status
            response.reason = parser.reason
            response.headers = parser.headers
        if parser.complete:
            self._finish(response)
        elif body := parser.body:
            pass_on = response.on_piece
            waiter = response.waiter
            if pass_on is not None and waiter is not None and not waiter.done() and not self._reading_paused:
                self._timer.last = self._loop.time()
                piece = b"".join(body)  # a single piece is not copied
                body.clear()
                if pass_on(piece):
                    self._buffered_bytes = 0
                    if len(data) >= _FULL_READ_BYTES:
                        self._let_others_run()
                    return
                body.append(piece)
            self._body_arrived(len(data))
            response.wake()
        elif parser.head_complete:
            if response.early or parser.status >= 500:
                response.wake()
            elif response.on_head is not None:
                on_head = response.on_head
                response.on_head = None
                on_head(response)

    def eof_received(self) -> bool:
        response = self._response
        if response is None:
            self._shut()
            return False
        try:
            self._parser.feed_eof()
        except UpstreamDisconnected as error:
            self._fail(error)
        else:
            self._finish(response)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = self.lost = True
        self._timer.close()
        self.resume_writing()
        self._fail(UpstreamDisconnected(f"connection lost: {exc}" if exc else "connection lost"))
        owner = self.owner
        self.owner = None
        if owner is not None:
            owner.lost(self)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable = self._writable
        self._writable = None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # the parts

    def _body_arrived(self, size_bytes: int) -> None:
        self._buffered_bytes += size_bytes
        if self._buffered_bytes > self._high_water_bytes:
            self._streaming = True
            self._timer.stop()  # the silence that follows is the reader's
            if not self._reading_paused:
                self._reading_paused = True
                self._transport.pause_reading()
        elif self._streaming:
            self._timer.last = self._loop.time()
        else:
            self._streaming = True
            self._timer.start(self._timeouts.idle_s)

    def _let_others_run(self) -> None:
        """uvloop reads on in the same turn of the event loop while reads are full, up to 8 MB."""
        self._transport.pause_reading()
        self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not (self.closed or self._reading_paused):
            self._transport.resume_reading()

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if not self.closed:
            self._transport.resume_reading()

    def _finish(self, response: UpstreamResponse) -> None:
        self._response = None
        response.finish(self._parser.take_body() if self._parser.body else b"")
        if self._reading_paused:
            self._resume_reading()
        sent = self._upload is None and not self._transport.get_write_buffer_size()
        if not sent or self.closed or self.owner is None or not self._parser.reusable:
            self._shut()
        else:
            self.owner.release(self)

    def _fail(self, error: BaseException) -> None:
        response = self._response
        self._response = None
        if response is not None:
            self._shut()
            response.fail(error, rest=self._parser.take_body())

    def _shut(self) -> None:
        """Close the socket, unsent bytes and all: what is left of this exchange has no reader."""
        if self._upload is not None:
            self._upload.cancel()
        if not self.closed:
            self.closed = True
            if self.owner is not None:
                self.owner.retire(self)
            self._transport.abort()

    def _timed_out(self) -> None:
        error: UpstreamError
        if self._streaming:
            error = IdleTimeout(f"silent for {self._timeouts.idle_s:g} s in the middle of a response")
        else:
            error = FirstByteTimeout(f"no body byte within {self._timeouts.first_byte_s:g} s")
        self._fail(error)

    async def _send_body(self, body: AsyncIterator[bytes | memoryview], length_bytes: int | None) -> None:
        await send_body(self.write, body, length_bytes=length_bytes)
        self._upload = None  # not in the task's callback, since the engine's response may precede that
        if self._response is not None and not self._streaming:
            self._timer.start(self._timeouts.first_byte_s)

    def _upload_done(self, upload: asyncio.Task[None]) -> None:
        """Drop a finished upload; the connection may carry another request by now."""
        self._uploads.discard(upload)
        if self._upload is not upload:
            return
        self._upload = None
        if upload.cancelled():
            self._fail(UpstreamDisconnected("the request body was cancelled"))
        elif (error := upload.exception()) is not None:
            self._fail(error)
