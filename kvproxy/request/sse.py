"""Error events of event streams: what a client of a broken one is told, and what an engine says in its own."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvproxy.types import RequestKind

#: Any error event has this; generated text cannot, since quotes in a JSON string are escaped.
ERROR_MARK = b'"error"'

#: A data line that is longer is not an error.
_MAX_ERROR_BYTES = 64 * 1024

_STATUS_KEYS = ("code", "status", "status_code", "http_status_code")
_NAME_KEYS = ("type", "code", "error_type")

#: Error types that name a mistake of the client, without "error" and what is no letter: OpenAI's, Anthropic's, vLLM's
#: and SGLang's, TGI's.
_CLIENT_ERRORS = frozenset(
    {
        *("invalidrequest", "badrequest", "notfound", "authentication", "unauthorized", "permission", "forbidden"),
        *("permissiondenied", "requesttoolarge", "unprocessableentity", "validation", "value", "billing"),
        *("ratelimit", "ratelimitexceeded", "contextlengthexceeded", "invalidprompt", "contentfilter"),
    }
)
#: Types of the responses API's events (and Anthropic's) that are errors.
_ERROR_KINDS = ("error", "response.failed")
_BUSY_ERRORS = frozenset({"overloaded", "serviceunavailable"})


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


def error_status(events: bytes, *, first: bool = False) -> int | None:
    """The HTTP status that an error event among `events` amounts to; None if there is none.

    With `first` only the first event is looked at, else those in the last 64 KiB. An event that names no status counts
    as 500, or 400 where its type is one of a client's mistake.
    """
    events = events[:_MAX_ERROR_BYTES] if first else events[-_MAX_ERROR_BYTES:]
    if ERROR_MARK not in events:
        return None
    name = b""
    for line in events.splitlines():
        if line.startswith(b"event:"):
            name = line[6:].strip()
        elif line.startswith(b"data:"):
            status = _status_of(line[5:], name) if ERROR_MARK in line and len(line) <= _MAX_ERROR_BYTES else None
            if status is not None or first:
                return status
        elif not line:
            name = b""
    return None


def _status_of(data: bytes, event: bytes) -> int | None:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(body, dict):
        return None
    kind = body.get("type")
    if kind == "response.failed" and isinstance(body.get("response"), dict):
        body = body["response"]
    error = body.get("error")
    if error is None and event != b"error" and kind not in _ERROR_KINDS and body.get("object") != "error":
        return None
    fields = {**body, **error} if isinstance(error, dict) else body
    return _numeric_status(fields) or _named_status(fields)


def _numeric_status(fields: dict[str, Any]) -> int | None:
    for key in _STATUS_KEYS:
        value = fields.get(key)
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 8:
            value = int(value)
        if isinstance(value, int | float) and 400 <= value <= 599:
            return int(value)
    return None


def _named_status(fields: dict[str, Any]) -> int:
    names = [fields[key] for key in _NAME_KEYS if isinstance(fields.get(key), str)]
    plain = {re.sub("[^a-z]", "", name[:64].lower()).removesuffix("error") for name in names}
    if plain & _CLIENT_ERRORS:
        return 400
    return 503 if plain & _BUSY_ERRORS else 500
