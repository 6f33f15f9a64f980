"""The middleware behind and before other ASGI middlewares: it learns, and a stream comes in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

import kvproxy
from kvproxy import KVCacheMiddleware
from tests.cache.support import long_text
from tests.embed.test_proxy_in_an_app import Keys
from tests.hosts.test_frameworks import ENGINES

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": long_text("w")}]}).encode()
#: Takes an app and returns it behind the middleware.
Wrap = Callable[[Any], Any]


async def _dispatch(request: Request, call_next: Any) -> Any:
    return await call_next(request)


def _of(module: str, name: str, **options: Any) -> Wrap:
    def wrap(app: Any) -> Any:
        return getattr(pytest.importorskip(module), name)(app, **options)

    return wrap


def _limited(app: Any) -> Any:
    """Return it behind slowapi, which looks for its limiter in the app of the scope."""
    known = Starlette()
    known.state.limiter = pytest.importorskip("slowapi").Limiter(key_func=lambda request: "anyone")
    limited = pytest.importorskip("slowapi.middleware").SlowAPIMiddleware(app)

    async def within(scope: Any, receive: Any, send: Any) -> None:
        await limited({**scope, "app": known}, receive, send)

    return within


class Rewriter:
    """Makes every path that of a chat."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app({**scope, "path": CHAT, "raw_path": CHAT.encode()}, receive, send)


STACKS: dict[str, Wrap] = {
    "authentication": lambda app: AuthenticationMiddleware(app, backend=Keys()),
    "base http": _of("starlette.middleware.base", "BaseHTTPMiddleware", dispatch=_dispatch),
    "cors": lambda app: CORSMiddleware(app, allow_origins=["*"]),
    "gzip": lambda app: GZipMiddleware(app, minimum_size=1),
    "trusted host": lambda app: TrustedHostMiddleware(app, allowed_hosts=["*"]),
    "session": lambda app: SessionMiddleware(app, secret_key="s"),
    "proxy headers": _of("uvicorn.middleware.proxy_headers", "ProxyHeadersMiddleware"),
    "correlation id": _of("asgi_correlation_id", "CorrelationIdMiddleware"),
    "starlette-context": _of("starlette_context.middleware", "RawContextMiddleware"),
    "starlette_exporter": _of("starlette_exporter", "PrometheusMiddleware"),
    "sentry": _of("sentry_sdk.integrations.asgi", "SentryAsgiMiddleware"),
    "opentelemetry": _of("opentelemetry.instrumentation.asgi", "OpenTelemetryMiddleware"),
    "slowapi": lambda app: _limited(app),
    "instrumentator": _of("prometheus_fastapi_instrumentator.middleware", "PrometheusInstrumentatorMiddleware"),
    "path rewriter": lambda app: Rewriter(app),
    "none": lambda app: app,
    "the proxy's own": lambda app: KVCacheMiddleware(app, endpoints={"x": "http://127.0.0.1:9"}),
}


class Gateway:
    """Serves from b, in two pieces, the second once `go_on` is set."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []
        self.go_on = asyncio.Event()
        self.app = Starlette(routes=[Route(CHAT, self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> StreamingResponse:
        await request.body()
        self.seen.append(kvproxy.preferred(request))
        kvproxy.served(request, "b")

        async def pieces() -> Any:
            yield b"data: 1\n\n"
            await self.go_on.wait()
            yield b"data: 2\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")


async def ask(app: Any, gateway: Gateway) -> bytes:
    """Send a chat as a server does; its body, whose second piece is made once the first one has arrived."""
    body = []
    left = asyncio.Event()
    messages = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            body.append(message["body"])
            gateway.go_on.set()

    headers = [(b"host", b"app"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
    addresses = {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http", "http_version": "1.1"}
    request = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
    asgi = {"asgi": {"version": "3.0", "spec_version": "2.3"}, "root_path": "", "state": {}}
    await asyncio.wait_for(app({**request, **addresses, **asgi, "headers": headers}, receive, send), 20)
    return b"".join(body)


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
@pytest.mark.parametrize("name", STACKS)
async def test_the_second_turn_is_known_and_the_stream_comes_in_pieces(name: str, outside: bool) -> None:
    gateway = Gateway()
    wrap = STACKS[name]
    middleware = KVCacheMiddleware(gateway.app if outside else wrap(gateway.app), endpoints=ENGINES)
    app = wrap(middleware) if outside else middleware
    async with middleware:
        for _ in range(2):
            gateway.go_on.clear()
            assert await ask(app, gateway) == b"data: 1\n\ndata: 2\n\n"
    # inside another one of ours the app sees what that one found
    assert gateway.seen == [None, None if name == "the proxy's own" and not outside else "b"]
