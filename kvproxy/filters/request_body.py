"""The body of one request for the upstream pool: bytes when it was read already, else a stream that runs once."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.types import Receive

from kvproxy.types import Headers


class ClientGone(Exception):
    """The client left while its body was on the way up."""


class RequestBody:
    """Hands out the body per attempt; `replayable` says whether another attempt may have it."""

    __slots__ = ("_length", "_receive", "_started", "_streams", "_whole", "consumed")

    def __init__(self, receive: Receive, headers: Headers, *, whole: bytes | None) -> None:
        self._receive = receive
        self._whole = whole
        self._length = b""
        self._streams = False
        if whole is None:
            self._read_framing(headers)
        self._started = False
        #: The body has been read to its end, so that the next message can only be a disconnect.
        self.consumed = whole is not None or not self._streams

    def _read_framing(self, headers: Headers) -> None:
        for name, value in headers:
            if name == b"content-length":
                self._length = value
                self._streams = value != b"0"
            elif name == b"transfer-encoding":
                self._streams = True

    @property
    def replayable(self) -> bool:
        """Whether an attempt may be followed by another one."""
        return not self._started

    @property
    def framing(self) -> Headers:
        """The client's content-length, so that a streamed body is not re-framed as chunked."""
        return [(b"content-length", self._length)] if self._whole is None and self._length and self._streams else []

    def take(self) -> bytes | AsyncIterator[bytes] | None:
        """The body for one attempt; None when the request has none."""
        if self._whole is not None:
            return self._whole
        if not self._streams:
            return None
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        self._started = True
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body: bytes = message.get("body", b"")
            if body:
                yield body
            if not message.get("more_body", False):
                self.consumed = True
                return
