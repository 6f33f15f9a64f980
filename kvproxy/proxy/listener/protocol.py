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
from kvproxy.proxy.listener.arrivals import PIECE_BYTES, Arrivals
from kvproxy.proxy.listener.cycle import (
    HttpDate,
    RequestCycle,
    Waiters,
    error_response,
    raw_error,
)
from kvproxy.proxy.listener.ending import Ending
from kvproxy.proxy.listener.parser import ListenerLimits, RequestParser, Scope

#: Connections beyond the bound that still get a 503; further ones are closed without an answer.
_REFUSED_POLITELY = 256


class ClientProtocol(asyncio.Protocol):
    """Asyncio protocol of one client connection, as uvicorn's server makes and keeps it.

    Pipelined requests are parsed a few ahead and answered in order. The end of the connection is reported to every app
    that still answers on it."""

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
        self.waiters = Waiters(self.loop)
        self.transport: asyncio.Transport
        self._config = config
        self._app: Any = config.loaded_app
        self._app_state = app_state
        self._server_state = server_state
        self._limits = limits
        self._on_refused = on_refused
        self._is_stopping = is_stopping
        self.parser: RequestParser
        #: The request whose response is in progress.
        self.running: RequestCycle | None = None
        #: Pipelined requests behind it.
        self.waiting: deque[tuple[RequestCycle, Scope]] = deque()
        self.arrivals = Arrivals(self)
        self.ending = Ending(self, limits, self.loop, on_linger=self.arrivals.resume)
        self._writable = True
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
        self.parser = RequestParser(self, self._limits, base_scope=base_scope, root_path=self._config.root_path)
        over = len(connections) - self._limits.max_connections
        if over > 0:
            self._app = _no_place
            self._on_refused()
        if over > min(_REFUSED_POLITELY, max(8, self._limits.max_connections // 8)):
            transport.abort()
            return
        self.ending.head_since = self.loop.time()
        self.ending.watch()
        if self._is_stopping():  # accepted before the drain
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        if self._stall is not None:
            self._stall.cancel()
        self.ending.lost()
        self._client_left()
        self.arrivals.unparsed = memoryview(b"")
        self.parser.close()

    def eof_received(self) -> None:
        """Treat a client that half-closes as gone; bytes it did not read must not keep the connection."""
        self._client_left()
        self.ending.guard()

    def data_received(self, data: bytes) -> None:
        linger = self.ending.linger
        arrivals = self.arrivals
        if linger is not None:
            linger.drop_bytes(len(data))
        elif arrivals.unparsed or self.waiting or data.find(b"\r", PIECE_BYTES) >= 0:
            arrivals.keep(data)
        else:
            arrivals.parse(data)

    def pause_writing(self) -> None:
        self._writable = False
        if self.running is not None and not self.running.disconnected:
            self.running.writable = False
        if self._limits.stall_timeout_s:
            self._stall = self.loop.call_later(self._limits.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._writable = True
        if self.running is not None:
            self.running.writable = True
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self.waiters.wake()

    # uvicorn's server

    def shutdown(self) -> None:
        """Close behind the response that is under way or, without one, behind the next request's if it comes within
        `closing_idle_s`. One more may follow a response whose head, already sent, could not announce the close."""
        ending = self.ending
        ending.closes_after_s = idle_s = self._limits.closing_idle_s
        running = self.running
        if ending.linger is not None or (running is None and not idle_s):
            ending.close()
        elif running is None:
            ending.idle_since = self.loop.time()
            ending.watch()
        elif not (running.response_started and idle_s):
            running.keep_alive = False

    # RequestOpener, for the parser

    def open_request(self, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> RequestCycle:
        """Begin the request at once, or in its turn behind those before it."""
        head_request = scope["method"] == "HEAD"
        http_1_0 = scope["http_version"] == "1.0"
        keep_alive = keep_alive and self.ending.closes_after_s is None
        cycle = RequestCycle(self, self.loop, head_request, http_1_0, keep_alive, expects_continue)
        self.arrivals.unwanted_bytes = 0
        scope["state"] = self._app_state.copy()
        scope[CONNECTION] = cycle
        if self.running is not None:
            self.waiting.append((cycle, scope))
            self.arrivals.pause()
        elif not self.ending.begun:
            self._run(cycle, scope)
        return cycle

    # Connection, for the requests

    def response_ended(self, cycle: RequestCycle) -> None:
        self._server_state.total_requests += 1
        self.running = None
        if self.transport.is_closing():
            return
        ending = self.ending
        arrivals = self.arrivals
        if not cycle.keep_alive:
            behind = self.parser.dropped_bytes or self.waiting or arrivals.unparsed
            ending.hang_up(unread=bool(behind) or not cycle.body_complete, by_close=cycle.ends_by_close)
            return
        ending.idle_since = ending.head_since = self.loop.time()
        if ending.closes_after_s is not None:
            ending.watch()
        if self.waiting:
            self._run(*self.waiting.popleft())
        if arrivals.paused or arrivals.unparsed:
            arrivals.read_on()

    # the parts

    def reject(self, status: HTTPStatus, message: str) -> None:
        """Answer and close; with a response already on its way there is nothing left but to cut the connection."""
        running = self.running
        if running is not None and running.response_started:
            self.transport.abort()
            return
        self._client_left()
        if not self.ending.begun:
            self.transport.write(raw_error(status, message, date=self.dates.line(self.loop.time())))
            self.ending.hang_up(unread=True)

    def _run(self, cycle: RequestCycle, scope: Scope) -> None:
        self.running = cycle
        cycle.writable = self._writable
        cycle.task = task = self.loop.create_task(cycle.run(self._app, scope))
        self.tasks.add(task)

    def _client_left(self) -> None:
        """Report the disconnect to the running request; pipelined ones never begin."""
        running = self.running
        self.running = None
        self.waiting.clear()
        if running is not None:
            running.client_left()
        self.waiters.wake()


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
