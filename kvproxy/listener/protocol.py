"""uvicorn's httptools protocol with bounds on clients, and with cheaper writing (see cycle.py)."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvproxy.listener.cycle import CoalescingCycle
from kvproxy.listener.limits import ListenerLimits
from kvproxy.listener.replies import error_reply, raw_error
from kvproxy.listener.uvicorns import difference

logger = logging.getLogger(__name__)

#: Unread request body held for a slow app before reading from the client pauses.
_HIGH_WATER_BYTES = 64 * 1024
#: Connections beyond the bound that still get a 503; further ones are closed without a word.
_REFUSED_POLITELY = 256


class Protocol(HttpToolsProtocol):
    """One client connection. Everything not said here is uvicorn's."""

    def __init__(self, *args: Any, limits: ListenerLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._refused = False  # came when every place was taken
        self._in_head = True
        self._head_bytes = 0
        self._head_since = 0.0
        self._idle_since = 0.0  # the last response went out and nothing came since; 0: something is under way
        self._parsed = (b"", "", b"", b"")  # the last URL and what became of it: clients repeat themselves
        self._running: CoalescingCycle | None = None  # `cycle` is the one whose request is being read
        self._watchdog: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self._limits.max_connections
        self._refused = over > 0
        if over > _REFUSED_POLITELY:
            transport.abort()
            return
        self._head_since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._watchdog, self._stall):
            if handle is not None:
                handle.cancel()
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(cycle, CoalescingCycle) and not cycle.response_complete:
                cycle.client_left()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._running = None

    def data_received(self, data: bytes) -> None:
        self._idle_since = 0.0
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._reject(_status_of(error), _text_of(error))
        else:
            if not self._in_head:
                self._head_bytes = 0
            elif self._head_bytes > self._limits.max_head_bytes:
                self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request head is too large")

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._head_since = self.loop.time()

    def on_headers_complete(self) -> None:
        parser = self.parser
        if parser.should_upgrade():
            return  # declined by data_received once the parser let go of it
        self._in_head = False
        limits = self._limits
        if len(self.headers) > limits.max_headers or (
            self._head_bytes > limits.max_head_bytes and self._head_size() > limits.max_head_bytes
        ):
            raise _TooLarge
        http_version = parser.get_http_version()
        self.scope = self._new_scope(http_version)
        keep_alive = http_version != "1.0" and parser.should_keep_alive()
        waiting = self.cycle is not None and not self.cycle.response_complete
        self.cycle = cycle = self._new_cycle(keep_alive=keep_alive)
        app = _no_place if self._refused else self.app
        if waiting:  # pipelined: answered in order
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))
        else:
            self._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if cycle.response_complete:
            return
        assert isinstance(cycle, CoalescingCycle)
        cycle.pieces.append(body)
        cycle.buffered_bytes += len(body)
        if cycle.buffered_bytes > _HIGH_WATER_BYTES:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._limits.stall_timeout_s:
            self._stall = self.loop.call_later(self._limits.stall_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def send_400_response(self, msg: str) -> None:
        self._reject(HTTPStatus.BAD_REQUEST, msg)

    def on_response_complete(self) -> None:
        """The next pipelined request, or a wait that the watchdog ends (uvicorn's timer for each costs more)."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = now = self.loop.time()
        watchdog, due = self._watchdog, now + self._limits.keep_alive_s
        if self._limits.keep_alive_s and (watchdog is None or watchdog.when() > due):
            self._watch()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.task = task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)

    def _new_scope(self, http_version: str) -> Any:
        url, path, raw_path, query = self._parsed
        if url != self.url:
            url = self.url
            parts = httptools.parse_url(url)
            raw_path, query = parts.path or b"/", parts.query or b""
            path = raw_path.decode("latin-1")
            path = self.root_path + (unquote(path) if "%" in path else path)
            raw_path = self.root_path.encode("ascii") + raw_path
            self._parsed = (url, path, raw_path, query)
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": http_version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "method": self.parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
        }

    def _new_cycle(self, *, keep_alive: bool) -> CoalescingCycle:
        return CoalescingCycle(
            self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            default_headers=self.server_state.default_headers,
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
            loop=self.loop,
            tasks=self.tasks,
        )

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Goes on as if nobody had asked for another protocol (RFC 9110 7.8); httptools alone would lose the body."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._reject(HTTPStatus.METHOD_NOT_ALLOWED, "this is not a forward proxy")
            return
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _reject(self, status: HTTPStatus, message: str) -> None:
        """Answers and closes; with a response already on its way there is nothing left but to cut the connection."""
        running = self._running
        if running is not None and not running.response_complete and running.response_started:
            self.transport.abort()
            return
        if running is not None and not running.response_complete:
            running.client_left()
        if not self.transport.is_closing():
            self.transport.write(raw_error(status, message))
            self.transport.close()

    def _watch(self) -> None:
        """Looks now and then whether a head is late or a connection idle for too long."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        limits, now = self._limits, self.loop.time()
        next_look_s = min(filter(None, (limits.head_timeout_s, limits.keep_alive_s)), default=0.0)
        if self._idle_since and limits.keep_alive_s:
            left_s = self._idle_since + limits.keep_alive_s - now
            if left_s <= 0:
                self.transport.close()
                return
            next_look_s = min(next_look_s, left_s)
        elif self._in_head and limits.head_timeout_s:
            limit_s = limits.head_timeout_s
            left_s = self._head_since + limit_s - now
            if left_s <= 0:
                self._reject(HTTPStatus.REQUEST_TIMEOUT, f"no complete request head within {limit_s:g} s")
                return
            next_look_s = min(next_look_s, left_s)
        if next_look_s:
            self._watchdog = self.loop.call_later(next_look_s, self._watch)

    def _stalled(self) -> None:
        self._stall = None
        self.transport.abort()


class _TooLarge(Exception):
    """Stops the parser: the head is over a bound."""


def _status_of(error: Exception) -> HTTPStatus:
    if isinstance(error.__context__, _TooLarge):
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    return HTTPStatus.BAD_REQUEST


def _text_of(error: Exception) -> str:
    return "the request head is too large" if isinstance(error.__context__, _TooLarge) else f"not HTTP: {error}"


async def _no_place(scope: Any, receive: Any, send: Any) -> None:
    """The app of a connection beyond the bound."""
    headers, body = error_reply(
        HTTPStatus.SERVICE_UNAVAILABLE, "every client connection is taken", kind="overloaded_error"
    )
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def http_protocol(limits: ListenerLimits, *, check: Callable[[], str] = difference) -> Any:
    """What uvicorn's `http=` gets: ours, or its own when it is not the uvicorn we know (said once in the log)."""
    problem = check()
    if not problem:
        return functools.partial(Protocol, limits=limits)
    logger.warning("plain uvicorn protocol, without our bounds on clients: %s", problem)
    return "httptools"
