"""One request and its response on a client's connection, with the response head and its first piece in one write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from kvproxy.types import BODY_FOLLOWS, CONNECTION, DISCONNECT_SIGNAL, DisconnectSignal

logger = logging.getLogger(__name__)

_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HEAD = b"\r\n\t " + bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
#: A smaller piece is copied behind its head, which costs less than another buffer of a write.
_JOINED_BYTES = 16 * 1024
_BODILESS = frozenset({204, 304})
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})


class Signal:
    """What uvicorn needs of asyncio.Event, for one waiter and without its cost."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self) -> None:
        if not self._set:
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self._waiter = None


class CoalescingCycle(RequestResponseCycle):
    """uvicorn's cycle with its own way of writing, and of handing the request body over without copying it twice.

    The head is held until the first piece of the body or the end of the loop's present turn, whichever comes first:
    one system call for a short response, and no delay for a head whose body takes long.
    """

    def __init__(
        self,
        scope: Any,
        *,
        transport: asyncio.Transport,
        flow: Any,
        logger: logging.Logger,
        default_headers: list[tuple[bytes, bytes]],
        expect_100_continue: bool,
        keep_alive: bool,
        on_response: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        # Instead of uvicorn's __init__, which makes a body buffer nobody uses (`difference` checks the names at start).
        self._method = scope["method"]
        self._http_1_0 = scope["http_version"] == "1.0"
        self.transport = transport
        self.flow = flow
        self.logger = logger
        self.default_headers = default_headers
        self.waiting_for_100_continue = expect_100_continue
        self.keep_alive = keep_alive
        self.on_response = on_response
        self.disconnected = False
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0
        self.message_event = cast("asyncio.Event", Signal())
        self.pieces: list[bytes] = []
        self.buffered_bytes = 0
        self._body_taken = False
        self.task: asyncio.Task[None] | None = None
        scope[CONNECTION] = self  # which keeps no scope in turn: a request leaves no reference cycle
        scope[DISCONNECT_SIGNAL] = self._departure = DisconnectSignal()
        self._tasks = tasks
        self._loop = loop
        self._head = b""
        self._bodiless = False
        self.ends_by_close = False  # the response, for want of a length and of chunks

    async def run_asgi(self, app: Any, scope: Any) -> None:  # type: ignore[override]
        """Lets the app answer; one that breaks the rules is logged, and its client gets 500 or a cut connection.

        The task leaves the running ones here, since a done callback costs another turn of the loop.
        """
        try:
            await app(scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                await self._unfinished(scope)
        except BaseException as error:  # whatever it raises, also when the drain cancelled it
            self.logger.error("Exception in ASGI application\n", exc_info=error)
            if self.response_started:
                self.transport.close()
            else:
                await self.send_500_response()
        finally:
            self.on_response = lambda: None
            if self.task is not None:
                self._tasks.discard(self.task)

    async def _unfinished(self, scope: Any) -> None:
        """The app returned too early: after a head on purpose, since only a broken connection tells the client then."""
        target = f"{scope['method']} {scope['raw_path'][:200].decode('ascii', 'backslashreplace')}"
        if not self.response_started:
            logger.error("no answer to %s: the app returned without one", target)
            await self.send_500_response()
            return
        logger.warning("the answer to %s broke off: its client's connection is cut", target)
        self._flush_head()
        self.transport.close()

    def client_left(self) -> None:
        """Nobody reads the response any more."""
        self.disconnected = True
        self.message_event.set()
        self._departure.tell()

    # ClientConnection

    @property
    def writable(self) -> bool:
        return self.disconnected or not self.flow.write_paused

    def take_body(self) -> bytes | None:
        if self.more_body or self._body_taken or self.disconnected:
            return None
        self._body_taken = True
        self.message_event.clear()
        self.flow.resume_reading()  # else the client's end would not be seen
        return self._take_pieces()

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._departure.watch(callback)

    def start(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], first_piece: bytes = b"", *, more: bool
    ) -> None:
        if self.disconnected:
            return
        if self.response_started:
            raise RuntimeError("the response has started already")
        self._start(status, headers)
        self._write_body(first_piece, more=more)

    def write(self, piece: bytes, *, more: bool) -> None:
        if self.disconnected:
            return
        if self.response_complete or not self.response_started:
            raise RuntimeError("the response is complete" if self.response_complete else "the response has no head")
        self._write_body(piece, more=more)

    async def drain(self) -> None:
        if not self.writable:
            await self.flow.drain()

    # ASGI

    async def receive(self) -> Any:
        """The next part of the request: everything of its body that arrived, or that the client is gone."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        self._body_taken = not self.more_body
        return {"type": "http.request", "body": self._take_pieces(), "more_body": self.more_body}

    def _take_pieces(self) -> bytes:
        pieces, self.pieces, self.buffered_bytes = self.pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def send(self, message: Any) -> None:
        """Writes once the client takes more; a client that is gone takes everything."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            self._write_body(message.get("body", b""), more=message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
            if BODY_FOLLOWS not in message:
                self._loop.call_soon(self._flush_head)
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._bodiless = status in _BODILESS or self._method == "HEAD"
        names: list[bytes] = []
        lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % pair for pair in self.default_headers]]
        says_close = False
        for name, value in headers:
            lower = name.lower()
            if lower in _FRAMING:
                if lower == b"content-length":
                    self.chunked_encoding = False
                    self.expected_content_length = int(value)
                elif lower == b"transfer-encoding":
                    continue  # ours to say
                else:
                    says_close = b"close" in value.lower()
                    self.keep_alive = self.keep_alive and not says_close
            names.append(lower)
            lines.append(b"%b: %b\r\n" % (lower, value))
        _refuse_unsafe(names, lines)
        if self.chunked_encoding is None and not self._bodiless:
            self.ends_by_close = self._http_1_0
            self.chunked_encoding = not self.ends_by_close
            if self.chunked_encoding:
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        self.response_started = True
        self.waiting_for_100_continue = False

    def _flush_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self.disconnected:
            self.transport.write(head)

    def _write_body(self, body: bytes, *, more: bool) -> None:
        head, self._head = self._head, b""
        pieces = self._frame(body, more=more)
        if head:
            pieces = (head, *pieces)
        if len(body) > _JOINED_BYTES:
            self.transport.writelines(pieces)
        elif data := b"".join(pieces):
            self.transport.write(data)
        if not more:
            self._end()

    def _frame(self, body: bytes, *, more: bool) -> tuple[bytes, ...]:
        if self._bodiless:
            return ()
        if self.chunked_encoding:
            end = b"" if more else b"0\r\n\r\n"
            return (b"%x\r\n" % len(body), body, b"\r\n" + end) if body else (end,)
        if not self.ends_by_close:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the response body is longer than its content-length")
        return (body,)

    def _end(self) -> None:
        if self.expected_content_length and not self._bodiless:
            raise RuntimeError("the response body is shorter than its content-length")
        self.response_complete = True
        self.message_event.set()
        self.on_response()  # closes the connection unless it is kept


def _refuse_unsafe(names: list[bytes], lines: list[bytes]) -> None:
    """A name that is no token, a control character, or more line ends than lines: one look at all lines together."""
    head = b"".join(lines)
    ends = head.count(b"\r\n")
    if (
        b"".join(names).translate(None, _TOKEN)
        or head.translate(None, _HEAD)
        or not ends == len(lines) == head.count(b"\r") == head.count(b"\n")
    ):
        raise RuntimeError("a response header with characters that are not allowed")
