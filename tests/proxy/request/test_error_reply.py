"""Answers the proxy makes itself."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from kvproxy.base.metrics.groups import Metrics
from kvproxy.proxy.request.error_reply import LINGER_BYTES, local_reply
from kvproxy.proxy.request.exchange import Exchange
from tests.support.asgi import Reply, call, http_scope


async def answered(path: str, status: int, *, metrics: Metrics | None = None) -> Reply:
    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await local_reply(
            scope, send, status=status, reason="why", message="What.", metrics=metrics or Metrics(),
            headers=[(b"retry-after", b"1")],
        )  # fmt: skip

    return await call(app, http_scope(path))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (502, "server_error"),
    ],
)
async def test_openai_shape(status: int, kind: str) -> None:
    """The four fields OpenAI's clients read."""
    reply = await answered("/v1/chat/completions", status)
    assert reply.status == status
    assert reply.json == {"error": {"message": "What.", "type": kind, "param": None, "code": "why"}}
    assert reply.headers[b"content-type"] == b"application/json"
    assert reply.headers[b"content-length"] == b"%d" % len(reply.body)
    assert reply.headers[b"retry-after"] == b"1"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (413, "request_too_large"), (502, "api_error"), (503, "overloaded_error")],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropic_shape(path: str, status: int, kind: str) -> None:
    """Anthropic's clients get their own error object."""
    reply = await answered(path, status)
    assert reply.json == {"type": "error", "error": {"type": kind, "message": "What."}}


async def test_counted_and_noted() -> None:
    """The metric has status and reason; the exchange knows how the request ended."""
    metrics = Metrics()
    scope = http_scope()
    exchange = Exchange.of(scope, now=0.0)

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await local_reply(scope, send, status=503, reason="no_endpoint", message="", metrics=metrics)

    await call(app, scope)
    sample = metrics.registry.get_sample_value(
        "kvproxy_local_replies_total", {"status": "503", "reason": "no_endpoint"}
    )
    assert sample == 1
    assert (exchange.outcome.status, exchange.outcome.end) == (503, "local_reply")


async def test_an_unread_body_is_dropped_up_to_a_bound() -> None:
    """The client sees the whole answer first; then a bounded part of what it still sends is dropped."""
    piece = b"x" * 65536
    read = 0
    sent_before_reading: list[Message] = []
    reply = Reply()

    async def receive() -> Message:
        nonlocal read
        if not read:
            sent_before_reading.extend(reply.messages)
        read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": True}

    async def send(message: Message) -> None:
        reply.messages.append(message)

    await local_reply(http_scope(), send, status=413, reason="why", message="What.", metrics=Metrics(), unread=receive)
    assert reply.headers[b"connection"] == b"close"
    assert b"".join(m.get("body", b"") for m in sent_before_reading) == reply.body
    assert read == LINGER_BYTES
    assert reply.messages[-1]["more_body"] is False


async def test_a_client_that_sends_no_more_is_not_waited_for_long() -> None:
    """The reply ends on its own when the client neither sends nor leaves."""
    reply = Reply()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        reply.messages.append(message)

    await local_reply(
        http_scope(), send, status=413, reason="why", message="", metrics=Metrics(), unread=receive, linger_s=0.01
    )
    assert reply.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
