"""Answers the listener makes itself, before any filter saw a request: in OpenAI's error shape."""

from __future__ import annotations

import json
from http import HTTPStatus


def error_reply(status: HTTPStatus, message: str, *, kind: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error that ends the connection."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status.value}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    return headers, body


def raw_error(status: HTTPStatus, message: str, *, kind: str = "invalid_request_error") -> bytes:
    """The same as bytes for the wire."""
    headers, body = error_reply(status, message, kind=kind)
    lines = [b"HTTP/1.1 %d %b" % (status.value, status.phrase.encode("ascii"))]
    lines += [b"%b: %b" % pair for pair in headers]
    return b"\r\n".join([*lines, b"", body])
