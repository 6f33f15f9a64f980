"""The response head on the wire, refused when it could be read as anything but one response."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from operator import itemgetter

from kvproxy.request.error_reply import error_body
from kvproxy.types import Headers

_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_HEAD = b"\r\n\t " + bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
_NAME = itemgetter(0)
_PHRASES = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}
_STATUS_LINES = {status: b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b"")) for status in range(200, 600)}


def encode_head(
    status: int, headers: Iterable[tuple[bytes, bytes]], *, bodiless: bool, http_1_0: bool, keep_alive: bool
) -> tuple[bytes, int | None, bool]:
    """The head, the length it states for the body (None: chunked, or for HTTP/1.0 ended by the close), and whether the
    connection is kept.

    Framing is the listener's: a transfer-encoding in `headers` is dropped. Raises RuntimeError for a status, a name or
    a value that no response may have.
    """
    fields = list(headers)
    names = list(map(_NAME, fields))
    unsafe = b"".join(names).translate(None, _TOKEN)
    if unsafe:  # a capital letter, or none that a name may have
        fields = [(name.lower(), value) for name, value in fields]
        names = [name for name, _ in fields]
        unsafe = b"".join(names).translate(None, _TOKEN)
    if b"transfer-encoding" in names:
        fields = [pair for pair in fields if pair[0] != b"transfer-encoding"]
    lines = [_STATUS_LINES.get(status, b"\0"), *map(b": ".join, fields)]
    length_bytes = _stated_length(fields, names) if b"content-length" in names else None
    if length_bytes is None and not bodiless and not http_1_0:
        lines.append(b"transfer-encoding: chunked")
    if b"connection" in names and any(name == b"connection" and b"close" in value.lower() for name, value in fields):
        keep_alive = False
    elif not keep_alive:
        lines.append(b"connection: close")
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    # One look at everything joined costs a tenth of a check per field.
    if (
        unsafe
        or b"" in names
        or head.translate(None, _HEAD)
        or not head.count(b"\r\n") == len(lines) == head.count(b"\r") == head.count(b"\n")
    ):
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


def raw_error(status: HTTPStatus, message: str) -> bytes:
    """The answer to what is no request: no path says which API the client speaks."""
    headers, body = error_response(status, message, reason=status.name.lower())
    head, _, _ = encode_head(status.value, headers, bodiless=False, http_1_0=False, keep_alive=False)
    return head + body
