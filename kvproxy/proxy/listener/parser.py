"""Requests, one after another, from the bytes of one client, within the listener's limits: httptools, and the rules it
leaves to its user.

No I/O and no clock, so that a fuzzer can drive it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import httptools

from kvproxy.base.types import Headers
from kvproxy.proxy.settings import LimitSettings

#: Chunk sizes, chunk extensions, trailers and blank lines without a body byte among them.
MAX_FRAMING_BYTES = 64 * 1024
#: Framing that any chunk may cost: its size in hexadecimal and two line ends.
_CHUNK_FRAMING_BYTES = 16
#: A longer head is parsed each time, whether or not the client repeats it.
_MAX_REPEATED_BYTES = 4096
#: After this many heads without a repetition the client is not expected to repeat one.
_PATIENCE = 8
#: Header fields the parser uses.
_NOTED = frozenset({b"host", b"expect", b"transfer-encoding"})
_LENGTH_FIELD = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
_LARGE_HEAD = "the request head is too large"
Scope = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Times in seconds; 0 is none."""

    max_connections: int = 10_000
    """Served at once; a further one gets 503, and with many further ones nothing at all."""
    max_head_bytes: int = 64 * 1024
    """Request line and header fields; more gets 431."""
    max_headers: int = 256
    """Header fields; more gets 431."""
    head_timeout_s: float = 20.0
    """From a request's first byte (or the connection's start) to the end of its head; then 408."""
    keep_alive_s: float = 75.0
    """A connection without a request is closed after this long (longer than clients keep theirs)."""
    stall_timeout_s: float = 120.0
    """A client that takes no byte of its response for this long is gone."""
    linger_s: float = 2.0
    """A client that has its last answer and sends no byte of an unread body for this long is gone; never 0."""
    closing_idle_s: float = 0.0
    """When the listener is closed, an idle connection has this long to learn of it with the answer to a request."""

    @classmethod
    def from_config(cls, limits: LimitSettings) -> ListenerLimits:
        """Return what the configuration states of the public listener."""
        return cls(
            max_connections=limits.connections,
            max_head_bytes=limits.head,
            head_timeout_s=limits.head_timeout,
            keep_alive_s=limits.keep_alive,
            stall_timeout_s=limits.stall_timeout,
        )


class BadRequest(Exception):
    """Input refused with this status and text; the parser takes nothing more."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class BodySink(Protocol):
    """Where the body of one request goes."""

    def body_arrived(self, pieces: Sequence[bytes], size_bytes: int, *, ended: bool = False) -> None:
        """Pieces of it, to be copied out of a list; `ended`: nothing follows them, and the request is complete."""
        ...


class RequestOpener(Protocol):
    """Receiver of each request whose head is complete: the connection."""

    def open_request(self, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> BodySink:
        """Return the sink of its body. `scope` is the request's ASGI scope."""
        ...


class _RepeatedHead:
    """A head as the client sent it, around the digits of its content-length, and the scope it stands for."""

    __slots__ = ("_after", "_before", "_headers", "_length_index", "_scope")

    def __init__(self, data: bytes, digits: re.Match[bytes], end: int, scope: Scope) -> None:
        self._before = data[: digits.start(1)]
        self._after = data[digits.end(1) : end]
        self._headers: Headers = scope["headers"].copy()
        self._length_index = next(n for n, (name, _) in enumerate(self._headers) if name == b"content-length")
        self._scope = scope

    @classmethod
    def find(cls, data: bytes, make_scope: Callable[[str], Scope]) -> _RepeatedHead | None:
        """Return that of a request that came alone and whole; None for one too long, or without a content-length."""
        end = data.find(b"\r\n\r\n") + 4
        digits = _LENGTH_FIELD.search(data, 0, end)
        if digits is None or end > _MAX_REPEATED_BYTES:
            return None
        if int(digits[1]) != len(data) - end:  # several requests, or one behind blank lines
            return None
        return cls(data, digits, end, make_scope("1.1"))

    def open_again(self, data: bytes | memoryview, opener: RequestOpener) -> bool:
        """Open the request if it is whole and has this head again, but for the number in content-length."""
        if not isinstance(data, bytes) or not data.startswith(self._before):
            return False
        start = len(self._before)
        end = data.find(b"\r", start, start + 10)
        if not data.startswith(self._after, end):
            return False
        digits = data[start:end]
        body_at = end + len(self._after)
        size_bytes = len(data) - body_at
        if not digits.isdigit() or int(digits) != size_bytes:
            return False
        scope = self._scope.copy()
        scope["headers"] = headers = self._headers.copy()
        headers[self._length_index] = (b"content-length", digits)
        sink = opener.open_request(scope, keep_alive=True, expects_continue=False)
        sink.body_arrived((data[body_at:],) if size_bytes else (), size_bytes, ended=True)
        return True


class RequestParser:
    """Feeds bytes to httptools and gives each request to its opener, one at a time.

    Raises BadRequest for what is not HTTP/1, what could be read as anything but one request, and what is over the
    limits. Offers to change the protocol are declined by going on (RFC 9110 7.8); trailers are dropped. After a request
    that asks to close the connection everything is dropped.
    """

    def __init__(self, opener: RequestOpener, limits: ListenerLimits, *, base_scope: Scope, root_path: str) -> None:
        self.in_head = False  # a request began, and its head is not complete
        self.head_began = False  # since the connection's last check
        self.dropped_bytes = 0  # behind the connection's last request
        self._opener: RequestOpener | None = opener
        self._limits = limits
        self._base_scope = base_scope
        self._root_path = root_path
        self._arrived: list[bytes] = []  # body pieces in the bytes being parsed
        self.on_body = self._arrived.append  # bound to C: a burst of small chunks costs one call each
        self._parser: Any = httptools.HttpRequestParser(self)
        self._sink: BodySink | None = None  # of the current request
        self._last = False  # no request follows the current one
        self._url = b""
        self._headers: Headers = []
        self._hosts = 0
        self._codings = 0
        self._expects_continue = False
        self._head_bytes = 0
        self._framing_bytes = 0  # since the last byte of a body
        self._fair_bytes = 0  # of the bytes being parsed: heads, bodies and unavoidable framing
        self._target = (b"", "", b"", b"")  # the last URL and its parts, since clients repeat them
        self._repeated: _RepeatedHead | None = None
        self._patience = _PATIENCE

    def feed(self, data: bytes | memoryview) -> None:
        """Take what arrived. Raises BadRequest."""
        fresh = self._sink is None and not self.in_head
        if fresh and self._repeated is not None:
            assert self._opener is not None
            if self._repeated.open_again(data, self._opener):
                self._framing_bytes = 0
                self._patience = _PATIENCE
                return
        if self._last and self._sink is None:
            self.dropped_bytes += len(data)
            return
        self._head_bytes += len(data)
        self._fair_bytes = 0
        try:
            self._execute(data)
        except httptools.HttpParserError as error:
            if not self._last or self._sink is not None:
                raise _as_bad_request(error) from None
            self.dropped_bytes += 1  # at least: the parser does not report where it stopped
            return
        if self._arrived:
            self._hand_over()
        self._check_framing(len(data))
        plain = not (self._last or self._expects_continue or self._codings)
        if fresh and plain and self._patience and self._sink is None and not self.in_head:
            repeated = _RepeatedHead.find(bytes(data), self._new_scope)
            if repeated is not None:
                self._patience -= 1
                self._repeated = repeated

    @property
    def declared_bytes(self) -> int | None:
        """Content-length of the request that is being read; None for one without, as a chunked one is."""
        value = next((value for name, value in self._headers if name == b"content-length"), None)
        return None if value is None else int(value)

    def close(self) -> None:
        """Lets the opener go, which keeps this parser: no reference cycle outlives a connection."""
        self._opener = self._sink = None
        self._parser = None

    # callbacks of httptools; an exception in one stops the parser

    def on_message_begin(self) -> None:
        if self._last:
            raise BadRequest(HTTPStatus.BAD_REQUEST, "a request after the last one")
        self._url = b""
        self._headers = []
        self._hosts = self._codings = 0
        self._expects_continue = False
        self.in_head = self.head_began = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # a trailer field, which must not count as one of the head (RFC 9110 6.5.1)
        name = name.lower()
        if name in _NOTED:
            self._note(name, value)
        headers = self._headers
        headers.append((name, value))
        if len(headers) > self._limits.max_headers:
            raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _LARGE_HEAD)

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return  # declined by _execute after the parser has returned
        self._fair_bytes += self._checked_head_bytes()
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        if self._hosts != 1 and (self._hosts or version == "1.1"):
            raise BadRequest(HTTPStatus.BAD_REQUEST, f"a request has one Host field, not {self._hosts}")
        self.in_head = False
        modern = version == "1.1"
        keep_alive = modern and parser.should_keep_alive()
        self._last = not keep_alive
        assert self._opener is not None
        self._sink = self._opener.open_request(
            self._new_scope(version), keep_alive=keep_alive, expects_continue=self._expects_continue and modern
        )

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self._hand_over(ended=True)
        self._sink = None

    # the parts

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"
        else:
            self._codings += 1
            first, _, last = value.lower().rpartition(b",")
            if self._codings > 1 or (first and last.strip() == b"chunked"):  # the parser refuses all other codings
                raise BadRequest(HTTPStatus.NOT_IMPLEMENTED, "no transfer coding but chunked is known here")

    def _checked_head_bytes(self) -> int:
        """Return the size of the head that is complete; raises BadRequest beyond the limit."""
        most = self._limits.max_head_bytes
        head_bytes = self._head_bytes
        if head_bytes > min(most, MAX_FRAMING_BYTES):  # of the head, or of the bytes that came with it
            head_bytes = len(self._url) + 32 + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if head_bytes > most:
                raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _LARGE_HEAD)
        return head_bytes

    def _check_framing(self, size_bytes: int) -> None:
        """Bounds what is neither a head nor a body, and a head that has not ended."""
        if self.in_head:
            self._head_bytes = max(0, self._head_bytes - self._fair_bytes)  # without the messages before this head
            if self._head_bytes > self._limits.max_head_bytes:
                raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _LARGE_HEAD)
            return
        self._head_bytes = 0
        framing = size_bytes - self._fair_bytes
        if self._framing_bytes + framing > MAX_FRAMING_BYTES:
            raise BadRequest(HTTPStatus.BAD_REQUEST, f"over {MAX_FRAMING_BYTES} bytes that are no body in a body")
        self._framing_bytes = max(0, framing) if self._fair_bytes else self._framing_bytes + framing

    def _hand_over(self, *, ended: bool = False) -> None:
        """Give the parts of a body that were parsed to its sink."""
        arrived = self._arrived
        size_bytes = sum(map(len, arrived))
        self._fair_bytes += size_bytes + len(arrived) * _CHUNK_FRAMING_BYTES
        assert self._sink is not None
        self._sink.body_arrived(arrived, size_bytes, ended=ended)
        arrived.clear()

    def _execute(self, data: bytes | memoryview) -> None:
        """Parse it. Goes on as if no other protocol had been offered, as often as a client offers one; httptools
        alone would lose the body."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            else:
                return
            method = self._parser.get_method()
            if method == b"CONNECT":
                raise BadRequest(HTTPStatus.METHOD_NOT_ALLOWED, "this is not a forward proxy")
            lines = [b"%b %b HTTP/%b" % (method, self._url, self._parser.get_http_version().encode())]
            lines += [b"%b: %b" % pair for pair in self._headers if pair[0] != b"upgrade"]
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _new_scope(self, version: str) -> Scope:
        url, path, raw_path, query = self._target
        if url != self._url:
            url = self._url
            parts = httptools.parse_url(url)
            raw_path = parts.path or b"/"
            query = parts.query or b""
            path = raw_path.decode("latin-1")
            path = self._root_path + (unquote(path) if "%" in path else path)
            raw_path = self._root_path.encode("ascii") + raw_path
            self._target = (url, path, raw_path, query)
        scope = self._base_scope.copy()
        scope["http_version"] = version
        scope["method"] = self._parser.get_method().decode("ascii")
        scope["path"] = path
        scope["raw_path"] = raw_path
        scope["query_string"] = query
        scope["headers"] = self._headers
        return scope


def _as_bad_request(error: Exception) -> BadRequest:
    """httptools wraps what a callback raised."""
    cause = error.__context__
    if isinstance(cause, BadRequest):
        return cause
    is_http2 = "PRI" in str(error)  # how its clients begin
    why = "HTTP/2 is not spoken here: use HTTP/1.1" if is_http2 else f"not HTTP: {error}"
    return BadRequest(HTTPStatus.BAD_REQUEST, why)
