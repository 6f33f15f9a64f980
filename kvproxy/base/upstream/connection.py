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
)
from kvproxy.base.socket_writes import write_pieces
from kvproxy.base.upstream.request import WireRequest, send_body
from kvproxy.base.upstream.response import PARSER_ERRORS, ResponseParser, UpstreamResponse

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
        self._on_idle: Callable[[], None] | None = on_idle
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
        """Give the pending loop timer back, for good."""
        self._limit_s = 0.0
        self._on_idle = None
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
        if self._on_idle is not None:
            self._on_idle()


class Reading:
    """How an answer is read: no faster than its reader takes it, and with a bound on the engine's silence."""

    def __init__(self, loop: asyncio.AbstractEventLoop, high_water_bytes: int, on_silence: Callable[[], None]) -> None:
        self.timer = IdleTimer(loop, on_silence)
        self.timeouts = Timeouts()
        self.streaming = False  # the first body byte came
        self.buffered_bytes = 0
        self.paused = False
        self.transport: asyncio.Transport
        self._loop = loop
        self._high_water_bytes = high_water_bytes

    def take_in(self, size_bytes: int) -> None:
        """Count a part of the body that its reader has not taken."""
        self.buffered_bytes += size_bytes
        if self.buffered_bytes > self._high_water_bytes:
            self.streaming = True
            self.timer.stop()  # the silence that follows is the reader's
            if not self.paused:
                self.paused = True
                self.transport.pause_reading()
        elif self.streaming:
            self.timer.last = self._loop.time()
        else:
            self.streaming = True
            self.timer.start(self.timeouts.idle_s)

    def resume(self) -> None:
        """Read on after a slow reader."""
        self.paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def let_others_run(self) -> None:
        """uvloop reads on in the same turn of the event loop while reads are full, up to 8 MB."""
        self.transport.pause_reading()
        self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not (self.paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def describe_silence(self) -> UpstreamError:
        """Return the error of an engine that was silent for too long."""
        if self.streaming:
            return IdleTimeout(f"silent for {self.timeouts.idle_s:g} s in the middle of a response")
        return FirstByteTimeout(f"no body byte within {self.timeouts.first_byte_s:g} s")


class Upload:
    """The part of a request's body that was not there with its head, written as the engine takes it by a task among
    `tasks`."""

    def __init__(
        self,
        connection: Connection,
        body: AsyncIterator[bytes | memoryview],
        *,
        length_bytes: int | None,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._connection = connection
        running = self._run(body, length_bytes)
        self.task = asyncio.get_running_loop().create_task(running, name="upstream upload")
        tasks.add(self.task)
        self.task.add_done_callback(tasks.discard)
        self.task.add_done_callback(self._end)

    async def _run(self, body: AsyncIterator[bytes | memoryview], length_bytes: int | None) -> None:
        await send_body(self._write, body, length_bytes=length_bytes)
        connection = self._connection
        connection.upload = None  # not in the task's callback, since the engine's response may precede that
        if connection.response is not None and not connection.reading.streaming:
            connection.reading.timer.start(connection.reading.timeouts.first_byte_s)

    async def _write(self, data: bytes | memoryview) -> None:
        """Write once the engine takes more; it has the first-byte timeout to do so."""
        connection = self._connection
        reading = connection.reading
        if connection.writable is not None:
            if not reading.streaming:
                reading.timer.start(reading.timeouts.first_byte_s)
            await connection.writable
            if not reading.streaming:
                reading.timer.stop()
        if connection.closed:
            raise UpstreamDisconnected("closed while the request was being sent")
        reading.transport.write(data)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Pass a failure on; the connection may carry another request by now."""
        connection = self._connection
        if connection.upload is not self:
            return
        connection.upload = None
        if task.cancelled():
            connection.fail(UpstreamDisconnected("the request body was cancelled"))
        elif (error := task.exception()) is not None:
            connection.fail(error)


class Connection(asyncio.Protocol):
    """The asyncio protocol of one upstream connection. Nothing here waits."""

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
        # made with the socket: uvloop makes a protocol for each attempt to connect, and failed ones leave no cycles
        self.parser: ResponseParser
        self.reading: Reading
        self.response: UpstreamResponse | None = None
        #: While the transport is paused.
        self.writable: asyncio.Future[None] | None = None
        #: Until all of the body is written.
        self.upload: Upload | None = None
        self._transport: asyncio.Transport

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
        self.parser.expect_response(request.method)
        reading = self.reading
        reading.timeouts = timeouts
        reading.streaming = False
        reading.buffered_bytes = 0
        self.response = response = UpstreamResponse(self, self._loop, early=early, on_head=on_head)
        buffers = request.buffers
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            write_pieces(self._transport, buffers)
        body = request.upload() if request.body is not None else None
        if body is None:
            reading.timer.start(timeouts.first_byte_s)
        else:  # the timer starts when the request is sent: until then the client may be the slow one
            reading.timer.stop()
            self.upload = Upload(self, body, length_bytes=request.length_bytes, tasks=self._uploads)
        return response

    def take(self) -> bytes | None:
        """Return the body that arrived; reading goes on if a slow reader had stopped it."""
        body = self.parser.body
        if not body:
            return None
        reading = self.reading
        reading.buffered_bytes = 0
        if reading.paused:
            reading.resume()
            reading.timer.start(reading.timeouts.idle_s)
        data = b"".join(body)  # a single piece is not copied
        body.clear()
        return data

    def cancel(self) -> None:
        """Give the response up and closes at once."""
        self.fail(UpstreamDisconnected("given up by the proxy"))

    def close(self) -> None:
        """Close at once; a reader that waits for a response gets UpstreamDisconnected."""
        self.cancel()
        self._shut()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.parser = ResponseParser()
        self.reading = Reading(self._loop, self._high_water_bytes, self._timed_out)
        self._transport = self.reading.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:  # unsolicited bytes could not be distinguished from the next response
            self._shut()
            return
        parser = self.parser
        body = parser.body
        try:
            parser.feed(data)
            if not body:
                parser.count_framing(len(data))
        except PARSER_ERRORS as error:
            if (reason := parser.explain(error)) is not None:
                self.fail(reason)
                return
        if not response.status and parser.head_complete:
            response.status = parser.status
            response.headers = parser.headers
        if parser.complete:
            self._finish(response)
        elif body:
            parser.framing_bytes = 0
            pass_on = response.on_piece
            waiter = response.waiter
            reading = self.reading
            if pass_on is not None and waiter is not None and not waiter.done() and not reading.paused:
                reading.timer.last = self._loop.time()
                piece = b"".join(body)  # a single piece is not copied
                body.clear()
                if pass_on(piece):
                    reading.buffered_bytes = 0
                    if len(data) >= _FULL_READ_BYTES:
                        reading.let_others_run()
                    return
                body.append(piece)
            reading.take_in(len(data))
            response.wake()
        elif parser.head_complete:
            if response.early or parser.status >= 500:
                response.wake()
            elif response.on_head is not None:
                on_head = response.on_head
                response.on_head = None
                on_head(response)

    def eof_received(self) -> bool:
        response = self.response
        if response is None:
            self._shut()
            return False
        try:
            self.parser.feed_eof()
        except UpstreamDisconnected as error:
            self.fail(error)
        else:
            self._finish(response)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = self.lost = True
        self.reading.timer.close()
        self.resume_writing()
        self.fail(UpstreamDisconnected(f"connection lost: {exc}" if exc else "connection lost"))
        self.parser.close()
        owner = self.owner
        self.owner = None
        if owner is not None:
            owner.lost(self)

    def pause_writing(self) -> None:
        self.writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable = self.writable
        self.writable = None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # the parts

    def _finish(self, response: UpstreamResponse) -> None:
        self.response = None
        response.finish(self.parser.take_body() if self.parser.body else b"")
        if self.reading.paused:
            self.reading.resume()
        sent = self.upload is None and not self._transport.get_write_buffer_size()
        if not sent or self.closed or self.owner is None or not self.parser.reusable:
            self._shut()
        else:
            self.owner.release(self)

    def fail(self, error: BaseException) -> None:
        """End the response with an error, and the connection with it."""
        response = self.response
        self.response = None
        if response is not None:
            self._shut()
            response.fail(error, rest=self.parser.take_body())

    def _shut(self) -> None:
        """Close the socket, unsent bytes and all: what is left of this exchange has no reader."""
        if self.upload is not None:
            self.upload.task.cancel()
        if not self.closed:
            self.closed = True
            if self.owner is not None:
                self.owner.retire(self)
            self._transport.abort()

    def _timed_out(self) -> None:
        self.fail(self.reading.describe_silence())
