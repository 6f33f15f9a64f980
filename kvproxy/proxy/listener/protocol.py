"""One client connection: its requests in order, the bounds on what the client may hold or make us wait for, and its
end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from kvproxy.base.types import CONNECTION
from kvproxy.proxy.listener.cycle import (
    HIGH_WATER_BYTES,
    HttpDate,
    RequestCycle,
    Waiters,
    error_response,
    raw_error,
)
from kvproxy.proxy.listener.parser import BadRequest, ListenerLimits, RequestParser, Scope

#: Of a body that goes on after its answer; one that does not end there costs its connection.
MAX_UNWANTED_BYTES = 1024 * 1024
#: Connections beyond the bound that still get a 503; further ones are closed without an answer.
_REFUSED_POLITELY = 256
#: Pieces in which possible pipelined requests are parsed, as their turn comes. A head is rarely longer, and bodies
#: usually have no carriage return: most requests are parsed in one piece, however long.
_PIECE_BYTES = 2048

#: A client that still sends after its last answer is cut after this long.
LONGEST_S = 30.0
#: Upper bound on the bytes dropped from it: about twice the usual limit of a body.
MOST_BYTES = 64 * 1024 * 1024


class ClientProtocol(asyncio.Protocol):
    """Asyncio protocol of one client connection, as uvicorn's server makes and keeps it.

    Pipelined requests are parsed a few ahead and answered in order. One timer looks now and then whether a head is late
    or the connection idle for too long. The end of the connection is reported to every app that still answers on it."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ListenerLimits,
        on_refused: Callable[[], object],
        is_stopping: Callable[[], bool] = lambda: False,
        dates: HttpDate | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.loop = _loop or asyncio.get_running_loop()
        self.tasks = server_state.tasks
        self.dates = dates or HttpDate()
        self.reading_paused = False
        self.waiters = Waiters(self.loop)
        self.transport: asyncio.Transport
        self._config = config
        self._app: Any = config.loaded_app
        self._app_state = app_state
        self._server_state = server_state
        self._limits = limits
        self._on_refused = on_refused
        self._is_stopping = is_stopping
        self._parser: RequestParser
        self._running: RequestCycle | None = None  # the request whose response is in progress
        self._queue: deque[tuple[RequestCycle, Scope]] = deque()  # pipelined requests behind it
        self._unparsed = memoryview(b"")  # arrived, but not its turn yet
        self._unwanted_bytes = 0  # of the current body, since its answer was sent
        self._writable = True
        self._head_since = 0.0  # time at which the current head began, or the connection did
        self._idle_since = 0.0  # time of the last response; 0: no request came yet
        self._closes_after_s: float | None = None  # of idleness, while the listener is closing
        self._linger: Linger | None = None  # after the last answer, while the client still sends
        self._watchdog: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)
        connections: set[Any] = self._server_state.connections
        connections.add(self)
        base_scope: Scope = {
            "type": "http",
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.3"},
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "root_path": self._config.root_path,
        }
        self._parser = RequestParser(self, self._limits, base_scope=base_scope, root_path=self._config.root_path)
        over = len(connections) - self._limits.max_connections
        if over > 0:
            self._app = _no_place
            self._on_refused()
        if over > min(_REFUSED_POLITELY, max(8, self._limits.max_connections // 8)):
            transport.abort()
            return
        self._head_since = self.loop.time()
        self._watch()
        if self._is_stopping():  # accepted before the drain
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        for handle in (self._watchdog, self._stall, self._linger):
            if handle is not None:
                handle.cancel()
        self._client_left()
        self._unparsed = memoryview(b"")
        self._parser.close()

    def eof_received(self) -> None:
        """Treat a client that half-closes as gone; bytes it did not read must not keep the connection."""
        self._client_left()
        self._guard_end()

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._linger.drop_bytes(len(data))
        elif self._unparsed or self._queue:
            self._unparsed = memoryview(bytes(self._unparsed) + data)
        elif len(data) > _PIECE_BYTES and data.find(b"\r", _PIECE_BYTES) >= 0:
            self._unparsed = memoryview(data)
            self.read_on()
        else:
            self._feed(data)

    def pause_writing(self) -> None:
        self._writable = False
        if self._running is not None and not self._running.disconnected:
            self._running.writable = False
        if self._limits.stall_timeout_s:
            self._stall = self.loop.call_later(self._limits.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._writable = True
        if self._running is not None:
            self._running.writable = True
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self.waiters.wake()

    # uvicorn's server

    def shutdown(self) -> None:
        """Close behind the response that is under way or, without one, behind the next request's if it comes within
        `closing_idle_s`. One more may follow a response whose head, already sent, could not announce the close."""
        self._closes_after_s = idle_s = self._limits.closing_idle_s
        running = self._running
        if self._linger is not None or (running is None and not idle_s):
            self.close()
        elif running is None:
            self._idle_since = self.loop.time()
            self._watch()
        elif not (running.response_started and idle_s):
            running.keep_alive = False

    # RequestOpener, for the parser

    def open_request(self, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> RequestCycle:
        """Begin the request at once, or in its turn behind those before it."""
        head_request = scope["method"] == "HEAD"
        http_1_0 = scope["http_version"] == "1.0"
        keep_alive = keep_alive and self._closes_after_s is None
        cycle = RequestCycle(self, self.loop, head_request, http_1_0, keep_alive, expects_continue)
        self._unwanted_bytes = 0
        scope["state"] = self._app_state.copy()
        scope[CONNECTION] = cycle
        if self._running is not None:
            self._queue.append((cycle, scope))
            self.pause_reading()
        elif self._linger is None and not self.transport.is_closing():
            self._run(cycle, scope)
        return cycle

    # Connection, for the requests

    def pause_reading(self) -> None:
        if not self.reading_paused:
            self.reading_paused = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        while self._unparsed and not self._held_up:
            piece = self._unparsed[:_PIECE_BYTES]
            self._unparsed = self._unparsed[_PIECE_BYTES:]
            self._feed(piece)
        if self.reading_paused and not self._held_up:
            self.reading_paused = False
            self.transport.resume_reading()

    def unwanted(self, size_bytes: int) -> None:
        self._unwanted_bytes += size_bytes
        if self._unwanted_bytes > MAX_UNWANTED_BYTES and not self._ending:
            self._hang_up(unread=True)

    def may_read_rest(self, arrived_bytes: int) -> bool:
        declared_bytes = self._parser.declared_bytes
        return declared_bytes is not None and declared_bytes - arrived_bytes <= MAX_UNWANTED_BYTES

    def response_ended(self, cycle: RequestCycle) -> None:
        self._server_state.total_requests += 1
        self._running = None
        if self.transport.is_closing():
            return
        if not cycle.keep_alive:
            behind = self._parser.dropped_bytes or self._queue or self._unparsed
            self._hang_up(unread=bool(behind) or not cycle.body_complete, ends_by_close=cycle.ends_by_close)
            return
        self._idle_since = self._head_since = self.loop.time()
        if self._closes_after_s is not None:
            self._watch()
        if self._queue:
            self._run(*self._queue.popleft())
        if self.reading_paused or self._unparsed:
            self.read_on()

    def close(self) -> None:
        if not self.transport.is_closing():
            self._guard_end()
            self.transport.close()

    # the parts

    @property
    def _ending(self) -> bool:
        return self._linger is not None or self.transport.is_closing()

    @property
    def _held_up(self) -> bool:
        """True while parsing is paused: earlier answers are due, or the app holds enough of its body."""
        running = self._running
        return self._ending or bool(self._queue) or (running is not None and running.buffered_bytes > HIGH_WATER_BYTES)

    def _run(self, cycle: RequestCycle, scope: Scope) -> None:
        self._running = cycle
        cycle.writable = self._writable
        cycle.task = task = self.loop.create_task(cycle.run(self._app, scope))
        self.tasks.add(task)

    def _feed(self, data: bytes | memoryview) -> None:
        parser = self._parser
        try:
            parser.feed(data)
        except BadRequest as error:
            self._reject(error.status, str(error))
            return
        if parser.head_began:
            parser.head_began = False
            if parser.in_head:
                self._head_since = self.loop.time()
        elif parser.dropped_bytes > MAX_UNWANTED_BYTES and not self._ending:
            self._hang_up(unread=True)

    def _client_left(self) -> None:
        """Report the disconnect to the running request; pipelined ones never begin."""
        running = self._running
        self._running = None
        self._queue.clear()
        if running is not None:
            running.client_left()
        self.waiters.wake()

    def _reject(self, status: HTTPStatus, message: str) -> None:
        """Answers and closes; with a response already on its way there is nothing left but to cut the connection."""
        running = self._running
        if running is not None and running.response_started:
            self.transport.abort()
            return
        self._client_left()
        if not self._ending:
            self.transport.write(raw_error(status, message, date=self.dates.line(self.loop.time())))
            self._hang_up(unread=True)

    def _hang_up(self, *, unread: bool, ends_by_close: bool = False) -> None:
        """Close the connection; at once only if the client has nothing left to send, or waits for the close (see
        linger.py)."""
        if not unread or (ends_by_close and not self.transport.can_write_eof()):
            self.close()
        elif self._linger is None:
            self._linger = Linger(self.transport, self.loop, silence_s=self._limits.linger_s)
            if self.reading_paused:
                self.reading_paused = False
                self.transport.resume_reading()

    def _guard_end(self) -> None:
        """Guard the end: a client that reads nothing more cannot keep a connection that is closed behind the bytes
        written to it."""
        self._cancel_watch()
        if self.transport.get_write_buffer_size():
            self._watchdog = self.loop.call_later(self._limits.stall_timeout_s or LONGEST_S, self.transport.abort)

    def _watch(self) -> None:
        """Look whether a head is late or the connection idle for too long, and when to look again."""
        self._cancel_watch()
        if self._ending:
            return
        limits = self._limits
        now = self.loop.time()
        keep_alive_s = limits.keep_alive_s if self._closes_after_s is None else self._closes_after_s
        next_look_s = min(filter(None, (limits.head_timeout_s, keep_alive_s)), default=0.0)
        if self._running is None:
            in_head = self._parser.in_head or not self._idle_since
            limit_s = limits.head_timeout_s if in_head else keep_alive_s
            left_s = (self._head_since if in_head else self._idle_since) + limit_s - now
            if limit_s and left_s <= 0:
                if in_head:
                    self._reject(HTTPStatus.REQUEST_TIMEOUT, f"no complete request head within {limit_s:g} s")
                else:
                    self.close()
                return
            if limit_s:
                next_look_s = min(next_look_s, left_s)
        if next_look_s:
            self._watchdog = self.loop.call_later(next_look_s, self._watch)

    def _cancel_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None


def _address(info: Any) -> tuple[str, int | None] | None:
    """Return a socket's address as in ASGI: host and port, or the path of a Unix socket."""
    if isinstance(info, (tuple, list)) and len(info) >= 2:
        return str(info[0]), int(info[1])
    return (info, None) if isinstance(info, str) and info else None


async def _no_place(scope: Any, receive: Any, send: Any) -> None:
    """Answer on a connection beyond the bound."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    headers, body = error_response(
        status, "every client connection is taken", reason="connections_full", path=scope["path"]
    )
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
