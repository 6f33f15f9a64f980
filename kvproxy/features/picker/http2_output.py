"""Frames on their way to one peer of HTTP/2."""

from __future__ import annotations

import asyncio

from kvproxy.base.socket_writes import write_pieces
from kvproxy.features.picker.http2_frames import Code, ConnectionFault

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
