"""What a client of a broken event stream is told: an error event in its API's own form."""

from __future__ import annotations

import msgspec

from kvproxy.types import RequestKind


def error_event(kind: RequestKind | None, *, message: str, reason: str, tail: bytes) -> bytes:
    """Bytes that end a broken stream: completes a half-sent event first (`tail` is what went last), then the error.

    OpenAI's clients raise on `data: {"error": ...}`, Anthropic's on `event: error`; the responses API has its own type.
    """
    separator = b"" if not tail or tail.endswith(b"\n\n") else b"\n\n"
    if kind is RequestKind.MESSAGES:
        body = {"type": "error", "error": {"type": "api_error", "message": message}}
        return separator + b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    if kind is RequestKind.RESPONSES:
        response_error = {"type": "error", "code": reason, "message": message, "param": None}
        return separator + b"event: error\ndata: " + msgspec.json.encode(response_error) + b"\n\n"
    error = {"error": {"message": message, "type": "upstream_error", "param": None, "code": reason}}
    return separator + b"data: " + msgspec.json.encode(error) + b"\n\ndata: [DONE]\n\n"
