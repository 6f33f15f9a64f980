"""One connection to an engine: a request out, its response in, then the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, cast

from kvproxy.errors import FirstByteTimeout, IdleTimeout, UpstreamDisconnected, UpstreamError, UpstreamProtocolError
from kvproxy.upstream.parser import ResponseParser
from kvproxy.upstream.response import UpstreamResponse
from kvproxy.upstream.timer import IdleTimer
from kvproxy.upstream.upload import send_body


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; 0 is none. `first_byte_s` runs from the request sent to the first body byte, `idle_s` between pieces."""

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0


class Owner(Protocol):
    """Who keeps a connection between two requests."""

    def release(self, connection: Connection) -> None:
        """It is at a message boundary and may serve another request."""
        ...

    def retire(self, connection: Connection) -> None:
        """It will serve no other request."""
        ...

    def lost(self, connection: Connection) -> None:
        """Its socket is gone."""
        ...


class Connection(asyncio.Protocol):
    """The asyncio protocol of one upstream connection. Nothing here waits except `write`."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, high_water_bytes: int) -> None:
        self.closed = False  # no further request: closing, closed, or the peer said so
        self.lost = False  # the socket is gone
        self.owner: Owner | None = None
        self._loop = loop
        self._high_water_bytes = high_water_bytes
        self._parser = ResponseParser()
        self._timer = IdleTimer(loop, self._silence)
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

    def send(self, method: bytes, data: bytes, *, timeouts: Timeouts) -> UpstreamResponse:
        """Sends a whole request (or its head, with `send_body_from` to follow)."""
        self._parser.expect(method)
        self._timeouts = timeouts
        self._streaming = False
        self._buffered_bytes = 0
        self._response = response = UpstreamResponse(self, self._loop)
        self._timer.start(timeouts.first_byte_s)
        self._transport.write(data)
        return response

    def send_body_from(self, body: AsyncIterator[bytes], length_bytes: int | None) -> asyncio.Task[None]:
        """Sends the body piece by piece (chunked when its length is unknown) while the response may already come."""
        self._timer.stop()  # until it is sent the client may be the slow one
        self._upload = upload = asyncio.create_task(self._send_body(body, length_bytes), name="upstream upload")
        upload.add_done_callback(self._upload_done)
        return upload

    async def write(self, data: bytes) -> None:
        """Writes once the engine takes more; it has the first-byte timeout to do so."""
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
        """The body that arrived; reading goes on if a slow reader had stopped it."""
        if not self._parser.body:
            return None
        self._buffered_bytes = 0
        if self._reading_paused:
            self._resume_reading()
            self._timer.start(self._timeouts.idle_s)
        return self._parser.drain()

    def cancel(self) -> None:
        """Gives the response up and closes at once."""
        self._fail(UpstreamDisconnected("given up by the proxy"))

    def close(self) -> None:
        """Closes at once; whoever still waits for a response gets UpstreamDisconnected."""
        self.cancel()
        self._shut()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # nobody asked: whatever it is, the next response could not be told from it
            self._shut()
            return
        parser = self._parser
        try:
            parser.feed(data)
        except UpstreamProtocolError as error:
            self._fail(error)
            return
        if parser.head_complete and not response.status:
            response.begin(parser.status, reason=parser.reason, headers=parser.headers)
        if parser.complete:
            self._finish(response)
        elif parser.body:
            self._body_arrived(len(data))
            response.arrived()

    def eof_received(self) -> bool:
        response = self._response
        if response is None:
            self._shut()
            return False
        try:
            self._parser.eof()
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
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.lost(self)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
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
            self._timer.touch()
        else:
            self._streaming = True
            self._timer.start(self._timeouts.idle_s)

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if not self.closed:
            self._transport.resume_reading()

    def _finish(self, response: UpstreamResponse) -> None:
        self._response = None
        self._timer.stop()
        response.finish(self._parser.drain())
        if self._reading_paused:
            self._resume_reading()
        sent = self._upload is None and not self._transport.get_write_buffer_size()
        if not sent or self.closed or self.owner is None or not self._parser.reusable:
            self._shut()
        else:
            self.owner.release(self)

    def _fail(self, error: BaseException) -> None:
        response, self._response = self._response, None
        if response is not None:
            self._timer.stop()
            self._shut()
            response.fail(error, rest=self._parser.drain())

    def _shut(self) -> None:
        """Closes the socket, unsent bytes and all: what is left of this exchange interests nobody."""
        if self._upload is not None:
            self._upload.cancel()
        if not self.closed:
            self.closed = True
            if self.owner is not None:
                self.owner.retire(self)
            self._transport.abort()

    def _silence(self) -> None:
        error: UpstreamError
        if self._streaming:
            error = IdleTimeout(f"silent for {self._timeouts.idle_s:g} s in the middle of a response")
        else:
            error = FirstByteTimeout(f"no body byte within {self._timeouts.first_byte_s:g} s")
        self._fail(error)

    async def _send_body(self, body: AsyncIterator[bytes], length_bytes: int | None) -> None:
        await send_body(self.write, body, length_bytes=length_bytes)
        self._upload = None  # here and not in the task's callback, which the engine's response may well precede
        if self._response is not None and not self._streaming:
            self._timer.start(self._timeouts.first_byte_s)

    def _upload_done(self, upload: asyncio.Task[None]) -> None:
        """Of an upload that came to its end nothing is left to say; the connection may carry another request by now."""
        if self._upload is not upload:
            return
        self._upload = None
        if upload.cancelled():
            self._fail(UpstreamDisconnected("the request body was cancelled"))
        elif (error := upload.exception()) is not None:
            self._fail(error)
