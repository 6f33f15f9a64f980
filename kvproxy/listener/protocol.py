"""uvicorn's httptools protocol with bounds on clients, and with cheaper writing (see cycle.py)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvproxy.errors import ConfigError, Problem
from kvproxy.listener.cycle import CoalescingCycle
from kvproxy.listener.limits import ListenerLimits
from kvproxy.listener.linger import Linger
from kvproxy.listener.replies import error_reply, raw_error
from kvproxy.listener.uvicorns import INSTALL, difference

#: Unread request body held for a slow app before reading from the client pauses.
_HIGH_WATER_BYTES = 64 * 1024
#: Chunk sizes, chunk extensions, trailers and blank lines without a body byte among them.
MAX_FRAMING_BYTES = 64 * 1024
#: Of a body that goes on after its answer; one that does not end there costs its connection.
MAX_UNWANTED_BYTES = 1024 * 1024
#: Framing that any chunk may cost: its size in hexadecimal and two line ends.
_CHUNK_FRAMING_BYTES = 16
#: Connections beyond the bound that still get a 503; further ones are closed without a word.
_REFUSED_POLITELY = 256
_LARGE_HEAD = "the request head is too large"
#: Header fields the listener looks at.
_NOTED = frozenset({b"host", b"expect", b"transfer-encoding"})


class Protocol(HttpToolsProtocol):
    """One client connection. Everything not said here is uvicorn's."""

    def __init__(self, *args: Any, limits: ListenerLimits, on_refused: Callable[[], object], **kwargs: Any) -> None:
        self._arrived: list[bytes] = []  # of a body, in what is being parsed
        self.on_body = self._arrived.append  # type: ignore[method-assign, assignment]  # C: small chunks cost little
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._on_refused = on_refused
        self._asgi_version = self.config.asgi_version
        self._refused = False  # came when every place was taken
        self._in_head = True
        self._head_bytes = 0
        self._head_since = 0.0
        self._idle_since = 0.0  # the last response went out and no request began since; 0: something is under way
        self._hosts = 0
        self._codings = 0
        self._framing_bytes = 0  # since the last byte of a body
        self._fair_bytes = 0  # of what is being parsed: heads, bodies and what chunks must cost
        self._unwanted_bytes = 0  # of the body that is being parsed, since its answer went out
        self._linger: Linger | None = None  # the last answer is out, the client still sends
        self._parsed = (b"", "", b"", b"")  # the last URL and what became of it: clients repeat themselves
        self._running: CoalescingCycle | None = None  # `cycle` is the one whose request is being read
        self._watchdog: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self._limits.max_connections
        self._refused = over > 0
        if self._refused:
            self._on_refused()
        if over > min(_REFUSED_POLITELY, max(8, self._limits.max_connections // 8)):
            transport.abort()
            return
        self._head_since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._watchdog, self._stall):
            if handle is not None:
                handle.cancel()
        if self._linger is not None:
            self._linger.cancel()
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(cycle, CoalescingCycle) and not cycle.response_complete:
                cycle.client_left()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._running = None

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._linger.heard(len(data))
            return
        self._head_bytes += len(data)
        self._fair_bytes = 0
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._reject(_status_of(error), _text_of(error))
        else:
            if self._arrived:  # of a body that has not ended
                self._hand_over()
                if self._unwanted_bytes > MAX_UNWANTED_BYTES and not self.transport.is_closing():
                    self._hang_up(unread=True)
                    return
            if not self._in_head:
                self._head_bytes = 0
                framing = len(data) - self._fair_bytes
                if self._framing_bytes + framing > MAX_FRAMING_BYTES:
                    self._reject(HTTPStatus.BAD_REQUEST, f"over {MAX_FRAMING_BYTES} bytes that are no body in a body")
                self._framing_bytes = max(0, framing) if self._fair_bytes else self._framing_bytes + framing
            else:
                self._head_bytes = max(0, self._head_bytes - self._fair_bytes)  # without the messages before this head
                if self._head_bytes > self._limits.max_head_bytes:
                    self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _LARGE_HEAD)

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._hosts = self._codings = self._unwanted_bytes = 0
        self._idle_since = 0.0
        self._head_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer field, which must not pass for one of the head (RFC 9110 6.5.1)
        name = name.lower()
        if name in _NOTED:
            self._note(name, value)
        self.headers.append((name, value))

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        else:
            self._codings += 1
            first, _, last = value.lower().rpartition(b",")
            if self._codings > 1 or (first and last.strip() == b"chunked"):  # the parser refuses all other codings
                raise _Refused(HTTPStatus.NOT_IMPLEMENTED, "no transfer coding but chunked is known here")

    def on_headers_complete(self) -> None:
        parser = self.parser
        if parser.should_upgrade():
            return  # declined by data_received once the parser let go of it
        self._in_head = False
        limits, head_bytes = self._limits, self._head_bytes
        if head_bytes > min(limits.max_head_bytes, MAX_FRAMING_BYTES):  # of the head, or of what came with it
            head_bytes = self._head_size()
        if len(self.headers) > limits.max_headers or head_bytes > limits.max_head_bytes:
            raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _LARGE_HEAD)
        self._fair_bytes += head_bytes
        http_version = parser.get_http_version()
        if self._hosts != 1 and (self._hosts or http_version == "1.1"):
            raise _Refused(HTTPStatus.BAD_REQUEST, f"a request has one Host field, not {self._hosts}")
        self.scope = self._new_scope(http_version)
        keep_alive = http_version != "1.0" and parser.should_keep_alive()
        waiting = self.cycle is not None and not self.cycle.response_complete
        self.cycle = cycle = self._new_cycle(keep_alive=keep_alive)
        app = _no_place if self._refused else self.app
        if waiting:  # pipelined: answered in order
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, functools.partial(app, self.scope)))
        else:
            self._start_asgi_task(cycle, functools.partial(app, self.scope))

    def _hand_over(self) -> None:
        """Gives the parts of a body that were parsed to its cycle."""
        arrived, cycle = self._arrived, self.cycle
        size_bytes = sum(map(len, arrived))
        self._fair_bytes += size_bytes + len(arrived) * _CHUNK_FRAMING_BYTES
        if not cycle.response_complete:
            assert isinstance(cycle, CoalescingCycle)
            cycle.pieces += arrived
            cycle.buffered_bytes += size_bytes
            if cycle.buffered_bytes > _HIGH_WATER_BYTES:
                self.flow.pause_reading()
            cycle.message_event.set()
        else:
            self._unwanted_bytes += size_bytes
        arrived.clear()

    def on_message_complete(self) -> None:
        if self._arrived:
            self._hand_over()
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
        running = self._running
        if running is not None and not running.keep_alive:
            self._hang_up(unread=running.more_body, ends_by_close=running.ends_by_close)
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self._in_head:
            return  # of the next request, whose own time runs
        self._idle_since = now = self.loop.time()
        watchdog, due = self._watchdog, now + self._limits.keep_alive_s
        if self._limits.keep_alive_s and (watchdog is None or watchdog.when() > due):
            self._watch()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.task = task = self.loop.create_task(cycle.run_asgi(app.func, app.args[0]))
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
            "asgi": {"version": self._asgi_version, "spec_version": "2.3"},
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
        return len(self.url) + 32 + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _feed(self, data: bytes) -> None:
        """Parses it. Goes on as if nobody had asked for another protocol (RFC 9110 7.8), as often as a client asks;
        httptools alone would lose the body."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            else:
                return
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._reject(HTTPStatus.METHOD_NOT_ALLOWED, "this is not a forward proxy")
                return
            lines = [b"%b %b HTTP/1.1" % (method, self.url)]
            lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

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
            self._hang_up(unread=True)

    def _hang_up(self, *, unread: bool, ends_by_close: bool = False) -> None:
        """Closes; at once only when the client has nothing left to send, or waits for the close (see linger.py)."""
        transport = self.transport
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if not unread or (ends_by_close and not transport.can_write_eof()):
            transport.close()
        elif self._linger is None:
            self._linger = Linger(transport, self.loop, silence_s=self._limits.linger_s)

    def shutdown(self) -> None:
        if self._linger is not None:
            self.transport.close()
        else:
            super().shutdown()

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


class _Refused(Exception):
    """Stops the parser."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def _status_of(error: Exception) -> HTTPStatus:
    cause = error.__context__
    return cause.status if isinstance(cause, _Refused) else HTTPStatus.BAD_REQUEST


def _text_of(error: Exception) -> str:
    cause = error.__context__
    return str(cause) if isinstance(cause, _Refused) else f"not HTTP: {error}"


async def _no_place(scope: Any, receive: Any, send: Any) -> None:
    """The app of a connection beyond the bound."""
    headers, body = error_reply(
        HTTPStatus.SERVICE_UNAVAILABLE, "every client connection is taken", kind="overloaded_error"
    )
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def http_protocol(
    limits: ListenerLimits, *, on_refused: Callable[[], object] = lambda: None, check: Callable[[], str] = difference
) -> Any:
    """What uvicorn's `http=` gets. Raises ConfigError for a uvicorn we do not know: without it there are no bounds."""
    problem = check()
    if problem:
        raise ConfigError(
            [Problem(f"uvicorn {uvicorn.__version__}", f"kvproxy does not work with it: {problem}", INSTALL)]
        )
    return functools.partial(Protocol, limits=limits, on_refused=on_refused)
