"""The response head on the wire, refused when it could be read as anything but one response."""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus

_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HEAD = b"\r\n\t " + bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})
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
    lines = [_STATUS_LINES.get(status, b"\0")]
    names: list[bytes] = []
    length_bytes: int | None = None
    says_close = False
    for name, value in headers:
        name = name.lower()
        if name in _FRAMING:
            if name == b"transfer-encoding":
                continue
            if name == b"connection":
                says_close = says_close or b"close" in value.lower()
            elif length_bytes is not None or not value.isdigit() or len(value) > 18:
                raise RuntimeError("a content-length that is no number, or a second one")
            else:
                length_bytes = int(value)
        names.append(name)
        lines.append(name + b": " + value)
    if length_bytes is None and not bodiless and not http_1_0:
        lines.append(b"transfer-encoding: chunked")
    if not keep_alive and not says_close:
        lines.append(b"connection: close")
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    _refuse_unsafe(head, names, len(lines))
    return head, length_bytes, keep_alive and not says_close


def _refuse_unsafe(head: bytes, names: list[bytes], lines: int) -> None:
    """A name that is no token, a control character, or more line ends than lines: one look at all lines together."""
    if (
        b"".join(names).translate(None, _TOKEN)
        or b"" in names
        or head.translate(None, _HEAD)
        or not head.count(b"\r\n") == lines == head.count(b"\r") == head.count(b"\n")
    ):
        raise RuntimeError("a response head with a status or with characters that are not allowed")


def error_headers(status: HTTPStatus, body: bytes) -> list[tuple[bytes, bytes]]:
    """The header fields of an answer of the listener's own; it ends the connection."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    return headers


def error_body(status: HTTPStatus, message: str, *, kind: str = "invalid_request_error") -> bytes:
    """JSON in OpenAI's error shape: no filter saw the request, so none can say which API it speaks."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status.value}}).encode()


def raw_error(status: HTTPStatus, message: str) -> bytes:
    """A whole response as bytes for the wire."""
    body = error_body(status, message)
    head, _, _ = encode_head(
        status.value, error_headers(status, body), bodiless=False, http_1_0=False, keep_alive=False
    )
    return head + body
