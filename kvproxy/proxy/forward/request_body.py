"""The body of one request for the upstream pool: bytes when all of it is there, else a stream that runs once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
from starlette.types import Receive

from kvproxy.base.types import Headers
from kvproxy.proxy.request.body import BodyTooLarge, BodyTooSlow, ClientLeft, HeldBodies, Pieces

#: Bytes of an upload (or all of a shorter one) that must have arrived before an engine gets it.
START_BYTES = 64 * 1024


@dataclass(slots=True)
class Uploads:
    """Bounds on the uploads of all requests. At most `max_streams` are streamed at once, so that slow clients cannot
    take every connection to the engines; further ones are collected whole first."""

    limit_bytes: int
    timeout_s: float  # total wait for one client's bytes
    held: HeldBodies
    max_streams: int
    streams: int = 0


class RequestBody(msgspec.Struct, eq=False):
    """Hands out the body per attempt; `replayable` shows whether another attempt may have it. Made by `of`, unless all
    of it is there.

    `read_beginning` comes before the first attempt and `release_bytes` when the request is over, whatever the end. A
    body that breaks a bound raises BodyRefused's kinds, out of `read_beginning` or out of the stream.
    """

    _receive: Receive
    _uploads: Uploads
    #: The whole body, once it has arrived.
    whole: bytes | None = None
    #: The body has been read to its end, so that the next message can only be a disconnect.
    consumed: bool = True
    #: Called when a stream has been read to its end.
    on_consumed: Callable[[], object] | None = None
    _length: bytes = b""
    _streams: bool = False
    _left_s: float = 0.0
    _received_bytes: int = 0
    _held_bytes: int = 0
    _start: bytes = b""  # of a stream
    _streaming: bool = False  # one of `uploads.streams`
    _started: bool = False

    @classmethod
    def of(cls, receive: Receive, headers: Headers, *, uploads: Uploads) -> RequestBody:
        """Return that of a request with these headers, of which nothing was read."""
        body = cls(receive, uploads)
        body._left_s = uploads.timeout_s
        body._read_framing(headers)
        body.consumed = not body._streams
        return body

    def _read_framing(self, headers: Headers) -> None:
        for name, value in headers:
            if name == b"content-length":
                self._length = value
                self._streams = value != b"0"
            elif name == b"transfer-encoding":
                self._streams = True

    @property
    def replayable(self) -> bool:
        """True if another attempt may follow."""
        return not self._started

    def with_bytes(self, whole: bytes) -> RequestBody:
        """Return the body of another request of the same client."""
        return RequestBody(self._receive, self._uploads, whole)

    @property
    def framing(self) -> Headers:
        """The client's content-length, so that a streamed body is not re-framed as chunked."""
        return [(b"content-length", self._length)] if self.whole is None and self._length and self._streams else []

    async def read_beginning(self, *, whole: Callable[[bytes], bool] | None = None) -> None:
        """Read the beginning of a body that was not read yet; all of it if it is short, if too many are streamed, or
        if `whole` shows so of what begins so."""
        if self.consumed:
            return
        uploads = self._uploads
        if self._length.isdigit() and (len(self._length) > 18 or int(self._length) > uploads.limit_bytes):
            raise BodyTooLarge(uploads.limit_bytes)
        pieces = Pieces()
        all_of_it: bool | None = None
        while True:
            if self._held_bytes >= START_BYTES:
                if all_of_it is None:
                    all_of_it = whole is not None and whole(pieces.joined())
                if not all_of_it and uploads.streams < uploads.max_streams:
                    break
            piece, more = await self._next()
            uploads.held.hold_bytes(len(piece))
            self._held_bytes += len(piece)
            pieces.append(piece)
            if not more:
                self.whole = pieces.joined()
                self.consumed = True
                return
        self._start = pieces.joined()
        self._streaming = True
        uploads.streams += 1

    def release_bytes(self) -> None:
        """Give back what the body holds."""
        self.on_consumed = None
        if self._streaming:
            self._end_stream()
        if self._held_bytes:
            self._uploads.held.give_back(self._held_bytes)
            self._held_bytes = 0

    def take(self) -> bytes | AsyncIterator[bytes] | None:
        """Yield the body for one attempt; None when the request has none."""
        if self.whole is not None:
            return self.whole
        if not self._streams:
            return None
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        self._started = True
        yield self._start
        more = True
        while more:
            piece, more = await self._next()
            if piece:
                yield piece
        self.consumed = True
        self._end_stream()
        if self.on_consumed is not None:
            self.on_consumed()

    async def _next(self) -> tuple[bytes, bool]:
        """Return what arrived, and whether more is to come. Only the client's time is counted, not what the engine
        takes."""
        uploads = self._uploads
        before = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(self._left_s, 0.0)):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(uploads.timeout_s) from None
        self._left_s -= asyncio.get_running_loop().time() - before
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece: bytes = message.get("body", b"")
        self._received_bytes += len(piece)
        if self._received_bytes > uploads.limit_bytes:
            raise BodyTooLarge(uploads.limit_bytes)
        return piece, message.get("more_body", False)

    def _end_stream(self) -> None:
        if self._streaming:
            self._streaming = False
            self._uploads.streams -= 1
