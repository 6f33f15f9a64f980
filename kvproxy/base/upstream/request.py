"""A request on the wire: its head, refused when it could be read as anything but one request, and how its body goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from operator import itemgetter

import msgspec

from kvproxy.base.errors import UnsafeRequest
from kvproxy.base.types import Headers
from kvproxy.base.upstream.origin import Origin

_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_VISIBLE = bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
_TEXT = b"\t " + _VISIBLE
_PER_REQUEST = frozenset({b"host", b"content-length", b"transfer-encoding"})
_WANTS_LENGTH = frozenset({b"POST", b"PUT", b"PATCH"})
#: First lines of requests for shorter targets are cached, since they repeat.
_MAX_TARGET_BYTES = 256
_LAST_CHUNK = b"0\r\n\r\n"

#: A smaller body is copied behind its head, which costs less than another buffer of a write.
_JOINED_BYTES = 16 * 1024
#: The kernel copies a write at once: 31 MiB would hold the event loop for 20 ms.
SLICE_BYTES = 1024 * 1024

Body = bytes | memoryview | AsyncIterator[bytes] | None
_NAME = itemgetter(0)

Write = Callable[[bytes | memoryview], Awaitable[None]]


class WireRequest(msgspec.Struct, eq=False):
    """One request encoded: `buffers` are written at once; a body that is longer or still on its way is uploaded."""

    method: bytes
    buffers: tuple[bytes | memoryview, ...]
    body: Body  # the part of the body that `buffers` lack
    length_bytes: int | None  # of the body; None: chunked

    @property
    def replayable(self) -> bool:
        """The same bytes can be sent a second time."""
        return self.body is None or isinstance(self.body, bytes | memoryview)

    def upload(self) -> AsyncIterator[bytes | memoryview] | None:
        """Yield the body piece by piece, where it does not go with the head."""
        return _slices(self.body) if isinstance(self.body, bytes | memoryview) else self.body


def _check_fields(text: bytes, names: list[bytes], lines: int) -> None:
    """Raise UnsafeRequest unless this text of `lines` lines has only allowed characters. One check of the joined fields
    costs a tenth of a check per field."""
    if b"".join(names).translate(None, _TOKEN) or b"" in names:
        raise UnsafeRequest("a method or header name that is not a token")
    if text.translate(None, _TEXT) != b"\r\n" * lines:  # the ends of its lines, and nothing else
        raise UnsafeRequest("a control character in a header value or in the request target")


class RepeatedFields:
    """Header fields that request after request has: checked and encoded once. Host and framing are none of these.

    Raises UnsafeRequest.
    """

    __slots__ = ("headers", "wire")

    def __init__(self, headers: Headers) -> None:
        names = list(map(_NAME, headers))
        if not _PER_REQUEST.isdisjoint(names):
            raise UnsafeRequest("host or framing among fields that repeat")
        lines = [*map(b": ".join, headers), b""]
        self.headers = headers  # not to be changed
        self.wire = b"\r\n".join(lines)
        _check_fields(self.wire, names, len(lines) - 1)


NO_FIELDS = RepeatedFields([])


def encode_request(
    origin: Origin,
    method: bytes,
    *,
    target: bytes,
    headers: Headers,
    body: Body,
    start: bytes = b"",
    repeated: RepeatedFields = NO_FIELDS,
) -> WireRequest:
    """Return the request for the wire; a body of bytes is not copied unless it is small, nor is one that a `start` was
    put in front of. Raises UnsafeRequest."""
    if body is not None and not isinstance(body, bytes | memoryview):
        head, length_bytes = encode_head(
            origin, method, target=target, headers=headers, body_bytes=None, has_body=True, repeated=repeated
        )
        return WireRequest(method, (head,), body, length_bytes)
    size_bytes = len(start) + len(body) if body else len(start)
    head, length_bytes = encode_head(
        origin,
        method,
        target=target,
        headers=headers,
        body_bytes=size_bytes,
        has_body=body is not None,
        repeated=repeated,
    )
    if length_bytes is None:
        chunk = (b"%x\r\n%b" % (size_bytes, start), body, b"\r\n" + _LAST_CHUNK) if body else (_LAST_CHUNK,)
        return WireRequest(method, (head, *chunk), None, None)
    if not body:
        return WireRequest(method, (head + start,), None, length_bytes)
    if size_bytes > SLICE_BYTES:
        return WireRequest(method, (head + start,), body, len(body))
    if size_bytes > _JOINED_BYTES:
        return WireRequest(method, (head + start, body), None, length_bytes)
    return WireRequest(method, (b"".join((head, start, body)),), None, length_bytes)


def encode_head(
    origin: Origin,
    method: bytes,
    *,
    target: bytes,
    headers: Headers,
    body_bytes: int | None,
    has_body: bool,
    repeated: RepeatedFields = NO_FIELDS,
) -> tuple[bytes, int | None]:
    """Return the head of one request, and how the body after it is framed: its length, or chunked when that is None.

    Host and the framing header are added when `headers` has none; `repeated` comes last. `body_bytes` is the body's
    size, None while it is not known. Raises UnsafeRequest for CR, LF, NUL or other controls, for what is not a token
    where one belongs, and for framing headers that contradict the body.
    """
    names = list(map(_NAME, headers))
    lines = [*map(b": ".join, headers), b""]
    own = b"\r\n".join(lines)
    _check_fields(own, names, len(headers))
    host = origin.host_header
    framing = b""
    if b"host" in names:
        host = b""
        if names.count(b"host") > 1:
            raise UnsafeRequest("more than one host")
    if b"content-length" in names or b"transfer-encoding" in names:
        length_bytes = _stated_length(headers, names, body_bytes=body_bytes, has_body=has_body)
    elif has_body and body_bytes is None:
        length_bytes = None
        framing = b"transfer-encoding: chunked\r\n"
    else:
        length_bytes = body_bytes or 0
        if length_bytes or method in _WANTS_LENGTH:
            framing = b"content-length: %d\r\n" % length_bytes
    first = _first_lines if len(target) <= _MAX_TARGET_BYTES else _first_lines.__wrapped__
    return b"%b%b%b%b\r\n" % (first(method, origin.base_path, target, host), own, framing, repeated.wire), length_bytes


@lru_cache(1024)
def _first_lines(method: bytes, base_path: bytes, target: bytes, host: bytes) -> bytes:
    """Return the request line, and that of the host unless it is b"". Raises UnsafeRequest."""
    if target[:1] not in (b"/", b"*") or target.translate(None, _VISIBLE):
        raise UnsafeRequest("a request target with spaces or control characters, or not starting with a slash")
    text = b"%b %b%b HTTP/1.1\r\n" % (method, base_path, target)
    if host:
        text += b"host: %b\r\n" % host
    _check_fields(text, [method], 2 if host else 1)
    return text


def _stated_length(headers: Headers, names: list[bytes], *, body_bytes: int | None, has_body: bool) -> int | None:
    """Return the framing the caller's own headers state, held against the body."""
    codings = names.count(b"transfer-encoding")
    if names.count(b"content-length") + codings > 1:
        raise UnsafeRequest("more than one content-length or transfer-encoding")
    if codings:
        coding = headers[names.index(b"transfer-encoding")][1]
        if coding.lower() != b"chunked" or not has_body:
            raise UnsafeRequest("a transfer-encoding other than chunked, or without a body")
        return None
    stated = headers[names.index(b"content-length")][1]
    if not stated.isdigit() or len(stated) > 18:
        raise UnsafeRequest("a content-length that is not a number")
    length_bytes = int(stated)
    if body_bytes is not None and body_bytes != length_bytes:
        raise UnsafeRequest(f"content-length {length_bytes} for a body of {body_bytes} bytes")
    return length_bytes


async def send_body(write: Write, body: AsyncIterator[bytes | memoryview], *, length_bytes: int | None) -> None:
    """Write the whole body, chunked when `length_bytes` is None.

    Raises UnsafeRequest when the body turns out longer or shorter than was announced: the connection must then be
    closed, since the engine would read the next request as the rest of this one.
    """
    sent_bytes = 0
    async for piece in body:
        if not piece:
            continue
        sent_bytes += len(piece)
        if length_bytes is None:
            await write(b"%x\r\n%b\r\n" % (len(piece), bytes(piece)))
        elif sent_bytes > length_bytes:
            raise UnsafeRequest(f"a body longer than its content-length {length_bytes}")
        else:
            await write(piece)
    if length_bytes is None:
        await write(_LAST_CHUNK)
    elif sent_bytes != length_bytes:
        raise UnsafeRequest(f"a body of {sent_bytes} bytes with content-length {length_bytes}")


async def _slices(body: bytes | memoryview) -> AsyncIterator[memoryview]:
    """Yield a long body uncopied, with a turn of the loop for others after each slice."""
    view = memoryview(body)
    for start in range(0, len(body), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]
        await asyncio.sleep(0)
