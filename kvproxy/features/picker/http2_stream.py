"""One stream of HTTP/2 (RFC 9113): what is sent on it, in frames, as far as the peer's windows allow."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from kvproxy.features.picker.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RESET,
    Code,
    encode_frame,
    encode_head,
)
from kvproxy.features.picker.http2_output import PeerOutput


class StreamHandler(Protocol):
    """Handler of one stream; `gone` is called once if it does not end by our own `finish` or `reset`."""

    def received(self, data: bytes) -> None: ...
    def half_closed(self) -> None: ...
    def gone(self) -> None: ...


class Carrier(Protocol):
    """All streams of a connection, as one of them sees them."""

    credit: int  # bytes that the peer takes, of all streams
    peer_frame_bytes: int
    output: PeerOutput

    def block(self, stream: Stream) -> None: ...
    def forget(self, stream: Stream) -> None: ...
    def grant(self, stream: Stream) -> None: ...


class Stream:
    """Stream of one exchange. Data waits here while the peer's windows are full."""

    __slots__ = (
        "_connection",
        "_ending",
        "_waiting",
        "closed",
        "credit",
        "handler",
        "id",
        "peer_ended",
        "received",
        "waiting_bytes",
    )

    def __init__(self, connection: Carrier, name: int, credit: int) -> None:
        self.id = name
        self.credit = credit  # bytes that the peer takes
        self.received = 0  # bytes that it was not granted again
        self.peer_ended = self.closed = False
        self.waiting_bytes = 0
        self.handler: StreamHandler
        self._connection = connection
        self._waiting: deque[bytes | memoryview] = deque()
        self._ending: bytes | None = None  # the trailers' block, once that is all there is to come

    def start(self, block: bytes) -> None:
        """Send the headers of the answer."""
        self._connection.output.write(encode_frame(HEADERS, END_HEADERS, self.id, block))

    def send(self, data: bytes) -> None:
        """Send a piece, in its turn."""
        if not self.closed:
            self._waiting.append(data)
            self.waiting_bytes += len(data)
            self.pump()

    def finish(self, block: bytes) -> None:
        """End with these trailers after all that waits."""
        if not self.closed:
            self._ending = block
            self.pump()

    def reset(self, code: Code) -> None:
        """End at once."""
        if not self.closed:
            self._connection.output.write(encode_frame(RESET, 0, self.id, code.to_bytes(4, "big")))
            self._close()

    def pump(self) -> None:
        """Send what the windows allow."""
        connection = self._connection
        output = connection.output
        while self._waiting:
            data = self._waiting[0]
            room = max(0, min(self.credit, connection.credit, connection.peer_frame_bytes))
            if (not room and data) or output.paused:
                connection.block(self)
                return
            self._waiting.popleft()
            if len(data) > room:
                data = memoryview(data)  # of which no piece is copied
                self._waiting.appendleft(data[room:])
                data = data[:room]
            self.credit -= len(data)
            connection.credit -= len(data)
            self.waiting_bytes -= len(data)
            output.write(encode_head(DATA, 0, self.id, len(data)))
            output.write(data)
        if self._ending is not None:
            output.write(encode_frame(HEADERS, END_HEADERS | END_STREAM, self.id, self._ending))
            if not self.peer_ended:
                output.write(encode_frame(RESET, 0, self.id, Code.NO_ERROR.to_bytes(4, "big")))
            self._close()
        elif self.received:
            connection.grant(self)

    def _close(self) -> None:
        self.closed = True
        self._waiting.clear()
        self._connection.forget(self)
