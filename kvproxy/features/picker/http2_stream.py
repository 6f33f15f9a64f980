"""One stream of HTTP/2 (RFC 9113): what is sent on it, in frames, as far as the peer's windows allow."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from kvproxy.base.socket_writes import write_pieces
from kvproxy.features.picker.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RESET,
    Code,
    ConnectionFault,
    encode_frame,
    encode_head,
)

#: Replies to pings and settings that the peer does not take; beyond this it is cut off.
_MAX_UNTAKEN_BYTES = 64 * 1024


class PeerOutput:
    """Frames to one peer, written together once a turn of the loop."""

    def __init__(self) -> None:
        self.paused = False  # the peer does not read at present
        self._transport: asyncio.Transport
        self._out: list[bytes | memoryview] = []
        self._flushing = False
        self._untaken = 0

    def connect(self, transport: asyncio.Transport) -> None:
        """Write to this transport."""
        self._transport = transport

    def write(self, data: bytes | memoryview) -> None:
        """Write with all else of this turn of the loop."""
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush)

    def answer(self, frame: bytes) -> None:
        """Write the answer to a peer's request. Raises ConnectionFault if it sends requests without end and reads
        nothing."""
        if self.paused:
            self._untaken += len(frame)
            if self._untaken > _MAX_UNTAKEN_BYTES:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "the peer sends requests and reads no answers")
        self.write(frame)

    def resume(self) -> None:
        """Note that the peer reads again."""
        self.paused = False
        self._untaken = 0

    def flush(self) -> None:
        """Write now."""
        self._flushing = False
        if self._out:
            out = self._out
            self._out = []
            if not self._transport.is_closing():  # uvloop raises where asyncio drops
                write_pieces(self._transport, out)

    def close(self) -> None:
        """End the connection behind all that was written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()


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
