"""Closing a connection whose client is still sending, without losing its answer."""

from __future__ import annotations

import asyncio

#: A client that sends nothing for this long has seen the end of the connection, or never will.
SILENCE_S = 2.0
#: However much it still sends, it is cut after this long.
LONGEST_S = 30.0
#: Nor is more than this dropped, however fast it comes: about twice the largest body that is usually taken.
MOST_BYTES = 64 * 1024 * 1024


class Linger:
    """Says that no more is coming, drops what the client sends, and closes once it has its answer and falls silent, or
    after a while.

    A socket closed with bytes left unread is reset, and the reset may overtake an answer that the client has not read
    yet (RFC 9112 9.6). Costs a socket for `longest_s` at most, the reading of `MOST_BYTES`, and no memory.
    """

    __slots__ = ("_end", "_heard", "_left_bytes", "_loop", "_silence_s", "_timer", "_transport")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        silence_s: float = SILENCE_S,
        longest_s: float = LONGEST_S,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._silence_s = silence_s
        self._end = loop.time() + longest_s
        self._heard = False
        self._left_bytes = MOST_BYTES
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = loop.call_later(silence_s, self._look)

    def heard(self, size_bytes: int) -> None:
        """The client sent that much; it is dropped."""
        self._heard = True
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            self._timer.cancel()
            self._transport.abort()

    def cancel(self) -> None:
        """The connection is gone."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._loop.time() >= self._end:
            self._transport.abort()
            return
        if not self._heard and not self._transport.get_write_buffer_size():
            self._transport.close()
            return
        self._heard = False
        self._timer = self._loop.call_later(self._silence_s, self._look)
