"""The end of a client's connection: behind its last answer, once the client has read that, or for want of a request."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from kvproxy.proxy.listener.parser import ListenerLimits, RequestParser

#: A client that still sends after its last answer is cut after this long.
LONGEST_S = 30.0
#: Upper bound on the bytes dropped from it: about twice the usual limit of a body.
MOST_BYTES = 64 * 1024 * 1024


class Ended(Protocol):
    """The connection, as its end sees it."""

    transport: asyncio.Transport
    parser: RequestParser

    @property
    def running(self) -> object | None: ...
    def reject(self, status: HTTPStatus, message: str) -> None: ...


class Ending:
    """The end of one connection. One timer looks now and then whether a head is late or the connection idle for too
    long. `on_linger` lets the rest of what the client sends arrive."""

    def __init__(
        self,
        connection: Ended,
        limits: ListenerLimits,
        loop: asyncio.AbstractEventLoop,
        *,
        on_linger: Callable[[], None],
    ) -> None:
        self.head_since = 0.0  # time at which the current head began, or the connection did
        self.idle_since = 0.0  # time of the last response; 0: no request came yet
        self.closes_after_s: float | None = None  # of idleness, while the listener is closing
        self.linger: Linger | None = None  # after the last answer, while the client still sends
        self._connection: Ended = weakref.proxy(connection)  # which keeps this: no reference cycle
        self._limits = limits
        self._loop = loop
        self._on_linger = on_linger
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def begun(self) -> bool:
        """No further request is read."""
        return self.linger is not None or self._connection.transport.is_closing()

    def close(self) -> None:
        """Close the connection after the bytes already written."""
        transport = self._connection.transport
        if not transport.is_closing():
            self.guard()
            transport.close()

    def hang_up(self, *, unread: bool, by_close: bool = False) -> None:
        """Close the connection; at once only if nothing more comes from the client, or it waits for the close."""
        transport = self._connection.transport
        if not unread or (by_close and not transport.can_write_eof()):
            self.close()
        elif self.linger is None:
            self.linger = Linger(transport, self._loop, silence_s=self._limits.linger_s)
            self._on_linger()

    def guard(self) -> None:
        """Cut a client that reads nothing more of what was written before the close."""
        self._cancel_watch()
        transport = self._connection.transport
        if transport.get_write_buffer_size():
            self._watchdog = self._loop.call_later(self._limits.stall_timeout_s or LONGEST_S, transport.abort)

    def watch(self) -> None:
        """Look whether a head is late or the connection idle for too long, and when to look again."""
        self._cancel_watch()
        if self.begun:
            return
        limits = self._limits
        now = self._loop.time()
        keep_alive_s = limits.keep_alive_s if self.closes_after_s is None else self.closes_after_s
        next_look_s = min(filter(None, (limits.head_timeout_s, keep_alive_s)), default=0.0)
        connection = self._connection
        if connection.running is None:
            in_head = connection.parser.in_head or not self.idle_since
            limit_s = limits.head_timeout_s if in_head else keep_alive_s
            left_s = (self.head_since if in_head else self.idle_since) + limit_s - now
            if limit_s and left_s <= 0:
                if in_head:
                    connection.reject(HTTPStatus.REQUEST_TIMEOUT, f"no complete request head within {limit_s:g} s")
                else:
                    self.close()
                return
            if limit_s:
                next_look_s = min(next_look_s, left_s)
        if next_look_s:
            self._watchdog = self._loop.call_later(next_look_s, self.watch)

    def lost(self) -> None:
        """Stop all timers once the connection is gone."""
        self._cancel_watch()
        if self.linger is not None:
            self.linger.cancel()

    def _cancel_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None


class Linger:
    """Lingering close: ends the write side, drops the client's bytes, and closes once the client has its answer and
    falls silent, or after a while.

    A socket closed with bytes left unread is reset, and the reset may overtake an answer that the client has not read
    yet (RFC 9112 9.6). Costs a socket for `longest_s` at most, the reading of `MOST_BYTES`, and no memory."""

    __slots__ = ("_end", "_heard", "_left_bytes", "_loop", "_silence_s", "_timer", "_transport")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        silence_s: float,
        longest_s: float = LONGEST_S,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._silence_s = silence_s
        self._end = loop.time() + longest_s
        self._heard = False
        self._left_bytes = MOST_BYTES
        if transport.can_write_eof():
            try:
                transport.write_eof()
            except OSError:  # the client is gone, which the transport has not noticed yet
                transport.abort()
        self._timer = loop.call_later(silence_s, self._look)

    def drop_bytes(self, size_bytes: int) -> None:
        """Drop bytes that the client sent."""
        self._heard = True
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            self._timer.cancel()
            self._transport.abort()

    def cancel(self) -> None:
        """Cancel after the connection was lost."""
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
