"""Event loops of trio: one sentence, and no request fails for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

import kvproxy

ENDPOINTS = {"a": "http://127.0.0.1:9"}
SENTENCE = "asyncio alone"
MAKERS: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "Proxy": lambda: kvproxy.Proxy({"endpoints": ENDPOINTS}),
    "Router": lambda: kvproxy.Router(endpoints=ENDPOINTS),
    "AsyncTransport": lambda: httpx.AsyncClient(transport=kvproxy.AsyncTransport(endpoints=ENDPOINTS)),
    "KVCacheMiddleware": lambda: kvproxy.KVCacheMiddleware(app, endpoints=ENDPOINTS),
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer everything, the lifespan included."""
    if scope["type"] == "lifespan":
        for half in ("startup", "shutdown"):
            await send({"type": f"lifespan.{half}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("name", MAKERS)
def test_entering_raises_the_sentence(name: str) -> None:
    with pytest.raises(RuntimeError, match=SENTENCE):
        MAKERS[name]().__aenter__().send(None)  # type: ignore[attr-defined]


def test_a_proxy_refuses_its_first_request_with_the_sentence() -> None:
    proxy = kvproxy.Proxy({"endpoints": ENDPOINTS})
    with pytest.raises(RuntimeError, match=SENTENCE):
        proxy({"type": "http", "headers": []}, None, None).send(None)  # type: ignore[arg-type, attr-defined]


def test_behind_the_middleware_the_host_lives_and_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Both halves of its lifespan run; the sentence is logged once."""
    middleware = kvproxy.KVCacheMiddleware(app, endpoints=ENDPOINTS)
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    chat = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    with caplog.at_level(logging.WARNING):
        for scope in ({"type": "lifespan"}, chat, dict(chat)):
            with pytest.raises(StopIteration):
                middleware(scope, None, send).send(None)  # type: ignore[arg-type, attr-defined]
    assert sent[:2] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert sent.count("http.response.start") == 2
    assert caplog.text.count(SENTENCE) == 1
    assert not middleware.status()["running"]
