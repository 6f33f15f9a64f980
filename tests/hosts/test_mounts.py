"""`kvproxy.Proxy` below a prefix of other frameworks, each by its own way to mount an ASGI app."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvproxy import Proxy
from kvproxy.testing import simulated_engines

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
CHAT = "/llm/v1/chat/completions"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello " * 400}], "max_tokens": 4, "stream": True}


def starlette(proxy: Proxy) -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount("/llm", proxy)])


def fastapi(proxy: Proxy) -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    app.mount("/llm", proxy)
    return app


def litestar(proxy: Proxy) -> Any:
    module = pytest.importorskip("litestar")

    async def llm(scope: Any, receive: Any, send: Any) -> None:
        await proxy(scope, receive, send)

    llm.__annotations__ = {
        "scope": module.types.Scope,
        "receive": module.types.Receive,
        "send": module.types.Send,
        "return": None,
    }
    return module.Litestar([module.asgi("/llm", is_mount=True, copy_scope=True)(llm)])


def quart(proxy: Proxy) -> Any:
    """By hypercorn's dispatcher, as Quart's documentation has it."""
    module = pytest.importorskip("quart")
    middleware = pytest.importorskip("hypercorn.middleware")
    return middleware.DispatcherMiddleware({"/llm": proxy, "": module.Quart("app")})


def blacksheep(proxy: Proxy) -> Any:
    module = pytest.importorskip("blacksheep")
    app = module.Application(router=module.Router())
    app.mount("/llm", proxy)
    return app


def django(proxy: Proxy) -> Any:
    """In asgi.py, before Django's own app."""
    from tests.hosts.test_frameworks import django as own

    inner = own("/v1/chat/completions")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        below = scope["type"] == "http" and scope["path"].startswith("/llm/")
        await (proxy({**scope, "root_path": "/llm"}, receive, send) if below else inner(scope, receive, send))

    return app


HOSTS: tuple[Callable[[Proxy], Any], ...] = (starlette, fastapi, litestar, quart, blacksheep, django)


@pytest.mark.parametrize("make", HOSTS, ids=lambda make: make.__name__)
async def test_a_mounted_proxy_serves_and_learns(make: Callable[[Proxy], Any]) -> None:
    async with simulated_engines(2) as endpoints, Proxy({"endpoints": endpoints}) as proxy:
        app = make(proxy)
        start = getattr(app, "start", None)
        if make is blacksheep and start is not None:
            await start()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", timeout=60) as client:
            first = await client.post(CHAT, json=BODY)
            assert first.status_code == 200, first.text
            assert first.text.endswith("data: [DONE]\n\n")
            second = await client.post(CHAT, json={**BODY, "stream": False})
            assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert (await client.get("/llm/v1/models")).json()["data"][0]["id"] == "sim"
            assert (await client.get("/llm/v1/engines")).json()["error"]["code"] == "path_not_public"
