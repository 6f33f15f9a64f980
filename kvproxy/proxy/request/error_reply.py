"""Answers the proxy makes itself, and what ends a broken stream, in the error shape of the API the client speaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import CONNECTION, RequestKind
from kvproxy.proxy.metrics import ClientBoundMetrics, RequestMetrics
from kvproxy.proxy.request.exchange import SCOPE_KEY

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

#: Bytes of an unwanted body that are read and dropped before its connection is closed, and for how long.
LINGER_BYTES = 1024 * 1024
LINGER_S = 1.0


class LocalReply(Exception):
    """The proxy answers a request by itself: with this status, `reason` (from a closed set) and text."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        unread: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = headers
        self.unread = unread  # more of the body may be arriving, unwanted


def speaks_anthropic(path: str) -> bool:
    """Return True if clients of this path expect Anthropic's error shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(path: str, status: int, *, reason: str, message: str) -> bytes:
    """JSON: OpenAI's `{"error": {...}}` with `reason` as its code, or Anthropic's `{"type": "error", ...}`."""
    if speaks_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return _anthropic(kind, message)
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return _openai(kind, message, reason)


def error_event(kind: RequestKind | None, *, message: str, reason: str) -> bytes:
    """Return the bytes that end a stream which broke between two events.

    OpenAI's clients raise on `data: {"error": ...}`, Anthropic's on `event: error`; the responses API has its own type.
    """
    if kind is RequestKind.MESSAGES:
        return b"event: error\ndata: " + _anthropic("api_error", message) + b"\n\n"
    if kind is RequestKind.RESPONSES:
        response_error = {"type": "error", "code": reason, "message": message, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(response_error) + b"\n\n"
    return b"data: " + _openai("upstream_error", message, reason) + b"\n\ndata: [DONE]\n\n"


def _anthropic(kind: str, message: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _openai(kind: str, message: str, code: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


async def local_reply(
    scope: Scope,
    send: Send,
    *,
    status: int,
    reason: str,
    message: str,
    metrics: Metrics,
    headers: Sequence[tuple[bytes, bytes]] | None = None,
    unread: Receive | None = None,
    linger_s: float = LINGER_S,
) -> None:
    """Answers with a JSON error and counts it under `reason` (a closed set: it is a metric label).

    The exchange of the scope, where there is one, notes the status and `end="local_reply"`. With `unread`, the receive
    of a request whose body is not wanted, the connection is closed instead of reading that body. Our listener then
    drops for a while what the client still sends; under another one that is done here, for a bounded part of it and at
    most `linger_s`.
    """
    exchange = scope.get(SCOPE_KEY)
    if exchange is not None:
        exchange.outcome.status = status
        exchange.outcome.end = "local_reply"
        exchange.outcome.local_reason = reason
    metrics.group(RequestMetrics).local_replies.labels(str(status), reason).inc()
    body = error_body(scope["path"], status, reason=reason, message=message)
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *(headers or ())]
    if unread is not None:
        head.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": head})
    if unread is not None and CONNECTION not in scope:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _linger(unread, linger_s)
        body = b""
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(why: LocalReply, scope: Scope, receive: Receive, send: Send, *, metrics: Metrics) -> None:
    """Answer a refused request."""
    if why.reason == "body_too_large":
        metrics.group(ClientBoundMetrics).body_refused.inc()
    elif why.reason == "bodies_full":
        metrics.group(ClientBoundMetrics).bodies_full.inc()
    await local_reply(
        scope,
        send,
        status=why.status,
        reason=why.reason,
        message=str(why),
        metrics=metrics,
        headers=why.headers,
        unread=receive if why.unread else None,
    )


async def _linger(receive: Receive, linger_s: float) -> None:
    """Drop what the client is still sending, within bounds.

    Closing a socket with bytes left unread resets it, and a client that is busy writing may then never see the answer.
    """
    dropped = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(linger_s):
            while dropped < LINGER_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
