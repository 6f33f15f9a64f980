"""One request and its response on a client's connection: as ASGI messages, as plain calls (ClientConnection), and the
response's head as bytes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from operator import itemgetter
from typing import Any, Protocol

import msgspec

from kvproxy.base.socket_writes import write_pieces
from kvproxy.base.types import Headers
from kvproxy.proxy.listener.arrivals import HIGH_WATER_BYTES, Arrivals
from kvproxy.proxy.listener.ending import Ending
from kvproxy.proxy.request.error_reply import error_body


class HttpDate:
    """Field line for the present second (RFC 9110 6.6.1). `now_s`: seconds of any clock that does not step back."""

    __slots__ = ("_line", "_make", "_until_s")

    def __init__(self, make: Callable[[], str] = lambda: formatdate(usegmt=True)) -> None:
        self._make = make
        self._line = b""
        self._until_s = -math.inf

    def line(self, now_s: float) -> bytes:
        """Return `date: Sun, 06 Nov 1994 08:49:37 GMT`."""
        if now_s >= self._until_s:
            self._line = b"date: " + self._make().encode("ascii")
            self._until_s = now_s + 1.0
        return self._line


logger = logging.getLogger(__name__)

#: Cost of a piece besides its bytes: a million chunks of one byte are no megabyte.
_PIECE_BYTES = 64
#: A smaller piece is copied behind its head, which costs less than another buffer of a write.
_JOINED_BYTES = 16 * 1024
_BODILESS = frozenset({204, 304})
_INTERNAL_ERROR = b"Internal Server Error"

#: Characters of a header name, and of a head without the ends of its lines.
_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_TEXT = b"\t " + bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
_NAME = itemgetter(0)
_PHRASES = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}
_STATUS_LINES = {status: b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b"")) for status in range(200, 600)}


class Waiters:
    """Apps of one connection that wait for more of a body, or for the client to read more."""

    __slots__ = ("_loop", "futures")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.futures: list[asyncio.Future[None]] = []

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done at the next `wake`."""
        waiter = self._loop.create_future()
        self.futures.append(waiter)
        return waiter

    def wake(self) -> None:
        """Let them look at what changed."""
        waiters = self.futures
        self.futures = []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Connection(Protocol):
    """The client's connection as its requests use it."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    tasks: set[asyncio.Task[None]]
    dates: HttpDate
    waiters: Waiters
    arrivals: Arrivals
    ending: Ending

    def response_ended(self, cycle: RequestCycle) -> None:
        """Handle the end of the response."""
        ...


class RequestCycle(msgspec.Struct, eq=False):
    """The request's state between its head and the end of its response. Keeps no scope: that keeps the cycle. (A
    struct: one is made in C.)

    A head sent by ASGI is held until the first piece of the body or the end of the loop's present turn, whichever comes
    first: one system call for a short response, and no delay for a head whose body takes long.
    """

    _connection: Connection
    loop: asyncio.AbstractEventLoop
    _head_request: bool
    _http_1_0: bool
    keep_alive: bool
    _expects_continue: bool
    writable: bool = True
    disconnected: bool = False
    body_complete: bool = False  # all of the request arrived
    response_started: bool = False
    response_complete: bool = False
    ends_by_close: bool = False  # the response has neither a length nor chunks
    task: asyncio.Task[None] | None = None
    _pieces: list[bytes] = []
    buffered_bytes: int = 0  # of the body; beyond HIGH_WATER_BYTES the app has enough for now
    _arrived_bytes: int = 0
    _body_taken: bool = False  # all of the body was read
    on_disconnect: Callable[[], None] | None = None
    _head: bytes = b""  # encoded, not written yet
    _bodiless: bool = False
    _chunked: bool = False
    _in_chunks: bool = False  # the head and a piece were written, and further pieces are chunks
    _left_bytes: int | None = None  # of the body, by the announced length

    async def run(self, app: Any, scope: Any) -> None:
        """Lets the app answer; one that breaks the rules is logged, and its client gets 500 or a cut connection.

        The task leaves the running ones here, since a done callback costs another turn of the loop.
        """
        try:
            await app(scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                self._break_off(scope)
        except BaseException as error:  # any error, also when the drain cancelled it
            logger.error("Exception in ASGI application\n", exc_info=error)
            self._fail()
        finally:
            self.on_disconnect = None
            if self.task is not None:
                self._connection.tasks.discard(self.task)

    # calls from the connection

    def body_arrived(self, pieces: Sequence[bytes], size_bytes: int, *, ended: bool = False) -> None:
        """Held until the app takes it; nothing of it once the response is complete. `ended`: so is the request."""
        self.body_complete = ended
        self._arrived_bytes += size_bytes
        if self.response_complete:
            self._connection.arrivals.unwanted(size_bytes)
            return
        self._pieces += pieces
        self.buffered_bytes += size_bytes + _PIECE_BYTES * len(pieces)
        if self.buffered_bytes > HIGH_WATER_BYTES:
            self._connection.arrivals.pause()
        if self._connection.waiters.futures:
            self._connection.waiters.wake()

    def client_left(self) -> None:
        if not self.disconnected and not self.response_complete:
            self.disconnected = self.writable = True
            self._in_chunks = False
            self._head = b""
            self._connection.waiters.wake()
            if self.on_disconnect is not None:
                self.on_disconnect()

    # ClientConnection

    def take_body(self) -> bytes | None:
        if not self.body_complete or self._body_taken or self.disconnected:
            return None
        self._body_taken = True
        pieces = self._pieces
        return pieces.pop() if len(pieces) == 1 and not self._connection.arrivals.paused else self._take_pieces()

    def start(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], first_piece: bytes = b"", *, more: bool
    ) -> None:
        if self.disconnected:
            return
        self._start(status, headers)
        self.write(first_piece, more=more)

    def write(self, piece: bytes, *, more: bool) -> None:
        if self._in_chunks and more and 0 < len(piece) <= _JOINED_BYTES:  # nearly every piece of a stream
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            return
        if self.disconnected:
            return
        if self.response_complete or not self.response_started:
            raise RuntimeError("the response is complete" if self.response_complete else "the response has no head")
        left_bytes = self._left_bytes
        if left_bytes is not None and not self._bodiless:
            self._left_bytes = left_bytes = left_bytes - len(piece)
            if left_bytes < 0 or (left_bytes and not more):
                raise RuntimeError("the response body is not as long as its content-length")
        head = self._head
        self._head = b""
        if self._bodiless:
            piece = b""
        end = b""
        if self._chunked:
            end = b"" if more else b"0\r\n\r\n"
            if piece:
                head = b"%b%x\r\n" % (head, len(piece))
                end = b"\r\n" + end
        if len(piece) > _JOINED_BYTES and (head or end):
            write_pieces(self._connection.transport, (head, piece, end))
        elif end:
            self._connection.transport.write(b"%b%b%b" % (head, piece, end))
        elif head or piece:
            self._connection.transport.write(head + piece)
        self._in_chunks = self._chunked and more
        if not more:
            self.response_complete = True
            if self._connection.waiters.futures:
                self._connection.waiters.wake()
            self._connection.response_ended(self)

    async def drain(self) -> None:
        while not self.writable:
            await self._connection.waiters.wait()

    # ASGI

    async def receive(self) -> dict[str, Any]:
        """Return the next part of the request: everything of its body that arrived, or that the client is gone."""
        if self._expects_continue:
            self._send_continue()
        while not self._pieces and (self._body_taken or not self.body_complete):
            if self.disconnected or self.response_complete:
                return {"type": "http.disconnect"}
            await self._connection.waiters.wait()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        self._body_taken = self.body_complete
        return {"type": "http.request", "body": self._take_pieces(), "more_body": not self._body_taken}

    async def send(self, message: Any) -> None:
        """Write once the client takes more; a client that is gone takes everything."""
        if not self.writable:
            await self.drain()
        kind = message["type"]
        if kind == "http.response.body":
            self.write(message.get("body", b""), more=message.get("more_body", False))
        elif kind != "http.response.start":
            raise RuntimeError(f"unexpected ASGI message {kind!r}")
        elif not self.disconnected:
            self._start(message["status"], message.get("headers", ()))
            self.loop.call_soon(self._flush_head)

    # the parts

    def _take_pieces(self) -> bytes:
        pieces = self._pieces
        self._pieces = []
        self.buffered_bytes = 0
        if self._connection.arrivals.paused:
            self._connection.arrivals.read_on()
        return b"".join(pieces)  # a single piece is not copied

    def _send_continue(self) -> None:
        """Send the interim answer, unless the client did not wait for it."""
        self._expects_continue = False
        if not (self._pieces or self.body_complete or self.disconnected):
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.response_started:
            raise RuntimeError("the response has started already")
        if not self.body_complete and self.keep_alive:
            # A client that waits for "100 Continue" may or may not send its body now: the next bytes could be either.
            # Unless the client is told, it sends its next request behind the rest of a long body, so the connection is
            # closed.
            self.keep_alive = not self._expects_continue and self._connection.arrivals.may_read_rest(
                self._arrived_bytes
            )
        self._expects_continue = False
        self._bodiless = status in _BODILESS or self._head_request
        head, self._left_bytes, self.keep_alive = encode_head(
            status,
            headers,
            bodiless=self._bodiless,
            http_1_0=self._http_1_0,
            keep_alive=self.keep_alive,
            date=self._connection.dates.line(self.loop.time()),
        )
        if self._left_bytes is None and not self._bodiless:
            self.ends_by_close = self._http_1_0
            self._chunked = not self._http_1_0
        self._head = head
        self.response_started = True

    def _flush_head(self) -> None:
        head = self._head
        self._head = b""
        if head:
            self._connection.transport.write(head)

    def _break_off(self, scope: Any) -> None:
        """Break off after an app that returned too early; after a head only a broken connection reveals that to the
        client."""
        target = f"{scope['method']} {scope['raw_path'][:200].decode('ascii', 'backslashreplace')}"
        if self.response_started:
            logger.warning("the answer to %s broke off: its client's connection is cut", target)
        else:
            logger.error("no answer to %s: the app returned without one", target)
        self._fail()

    def _fail(self) -> None:
        """500, or a cut connection where a response is on its way; a client that has all of its own is let be."""
        if self.response_complete or self.disconnected:
            return
        if self.response_started:
            self._flush_head()
            self._connection.ending.close()
            return
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(_INTERNAL_ERROR)),
            (b"connection", b"close"),
        ]
        self.start(500, headers, _INTERNAL_ERROR, more=False)


def encode_head(
    status: int,
    headers: Iterable[tuple[bytes, bytes]],
    *,
    bodiless: bool,
    http_1_0: bool,
    keep_alive: bool,
    date: bytes = b"",
) -> tuple[bytes, int | None, bool]:
    """Return the head, the length it states for the body (None: chunked, or for HTTP/1.0 ended by the close), and
    whether the connection is kept.

    Framing is the listener's: a transfer-encoding in `headers` is dropped. `date` is a line for those without that
    field. Raises RuntimeError for a status, a name or
    a value that no response may have.
    """
    fields = list(headers)
    names = list(map(_NAME, fields))
    unsafe = b"".join(names).translate(None, _TOKEN)
    if unsafe:  # a capital letter, or one that no name may have
        fields = [(name.lower(), value) for name, value in fields]
        names = [name for name, _ in fields]
        unsafe = b"".join(names).translate(None, _TOKEN)
    if b"transfer-encoding" in names:
        fields = [pair for pair in fields if pair[0] != b"transfer-encoding"]
    lines = [_STATUS_LINES.get(status, b"\0"), *map(b": ".join, fields)]
    length_bytes = _stated_length(fields, names) if b"content-length" in names else None
    if length_bytes is None and not bodiless and not http_1_0:
        lines.append(b"transfer-encoding: chunked")
    if date and b"date" not in names:
        lines.append(date)
    if b"connection" in names and any(name == b"connection" and b"close" in value.lower() for name, value in fields):
        keep_alive = False
    elif not keep_alive:
        lines.append(b"connection: close")
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    # One check of the joined head costs a tenth of a check per field: without all allowed characters, only our own line
    # ends are left.
    if unsafe or b"" in names or head.translate(None, _TEXT) != b"\r\n" * len(lines):
        raise RuntimeError("a response head with a status or with characters that are not allowed")
    return head, length_bytes, keep_alive


def _stated_length(fields: list[tuple[bytes, bytes]], names: list[bytes]) -> int:
    value = fields[names.index(b"content-length")][1]
    if names.count(b"content-length") > 1 or not value.isdigit() or len(value) > 18:
        raise RuntimeError("a content-length that is no number, or a second one")
    return int(value)


def error_response(status: HTTPStatus, message: str, *, reason: str, path: str = "") -> tuple[Headers, bytes]:
    """Header fields and body of an answer of the listener's own; it ends the connection."""
    body = error_body(path, status.value, reason=reason, message=message)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    return headers, body


def raw_error(status: HTTPStatus, message: str, *, date: bytes) -> bytes:
    """Return the answer to invalid input, which has no path and so no API whose format it could follow."""
    headers, body = error_response(status, message, reason=status.name.lower())
    head, _, _ = encode_head(status.value, headers, bodiless=False, http_1_0=False, keep_alive=False, date=date)
    return head + body
