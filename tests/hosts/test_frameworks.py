"""KVCacheMiddleware around the apps of other frameworks, at the root and below a prefix."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import kvproxy
from kvproxy import KVCacheMiddleware
from tests.cache.support import NOWHERE, long_text

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
ENGINES = {"a": NOWHERE, "b": NOWHERE}
TURN = {"model": "m", "messages": [{"role": "user", "content": long_text("w")}]}
Make = Callable[[str], Any]


def note(scope: Any) -> dict[str, str | None]:
    """Serve from b, and answers with what was preferred."""
    found = kvproxy.preferred(scope)
    kvproxy.served(scope, "b")
    return {"preferred": found}


def plain(path: str) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        body = json.dumps(note(scope)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    return app


def starlette(path: str) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def chat(request: Any) -> Any:
        await request.body()
        return JSONResponse(note(request))

    return Starlette(routes=[Route(path, chat, methods=["POST"])])


def fastapi(path: str) -> Any:
    from fastapi import FastAPI, Request

    app = FastAPI()

    async def chat(request: Request) -> Any:
        await request.body()
        return note(request)

    chat.__annotations__["request"] = Request
    app.post(path)(chat)
    return app


def quart(path: str) -> Any:
    module = pytest.importorskip("quart")
    app = module.Quart("app")

    async def chat() -> Any:
        await module.request.get_data()
        return note(module.request.scope)

    app.post(path)(chat)
    return app


def litestar(path: str) -> Any:
    module = pytest.importorskip("litestar")

    async def chat(request: Any) -> dict[str, Any]:
        await request.body()
        return note(request)

    chat.__annotations__ = {"request": module.Request, "return": dict}
    return module.Litestar(route_handlers=[module.post(path, status_code=200)(chat)])


def falcon(path: str) -> Any:
    module = pytest.importorskip("falcon.asgi")

    class Chat:
        async def on_post(self, request: Any, response: Any) -> None:
            await request.stream.read()
            response.media = note(request.scope)

    app = module.App()
    app.add_route(path, Chat())
    return app


def blacksheep(path: str) -> Any:
    module = pytest.importorskip("blacksheep")
    app = module.Application()

    async def chat(request: Any) -> Any:
        await request.read()
        return module.json(note(request.scope))

    chat.__annotations__ = {"request": module.Request}
    app.router.add_post(path, chat)
    return app


def django(path: str) -> Any:
    module = pytest.importorskip("django")
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import JsonResponse
    from django.urls import path as route

    async def chat(request: Any) -> Any:
        assert request.body
        return JsonResponse(note(request.scope))

    if not settings.configured:
        settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x", MIDDLEWARE=[])
        module.setup()
    from django.urls import clear_url_caches

    clear_url_caches()
    globals()["urlpatterns"] = [route(path.removeprefix("/"), chat)]
    return get_asgi_application()


FRAMEWORKS: tuple[Make, ...] = (plain, starlette, fastapi, quart, litestar, falcon, blacksheep, django)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/llm/v1/chat/completions"])
@pytest.mark.parametrize("make", FRAMEWORKS, ids=lambda make: make.__name__)
async def test_the_second_turn_is_known(make: Make, path: str) -> None:
    """A request is followed to where it was served, whatever the framework does with its scope and body."""
    app = make(path)
    start = getattr(app, "start", None)
    if make is blacksheep and start is not None:
        await start()
    middleware = KVCacheMiddleware(app, endpoints=ENGINES)
    async with middleware, httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://app") as http:
        first = await http.post(path, json=TURN)
        assert first.status_code == 200, first.text
        assert first.json() == {"preferred": None}
        assert (await http.post(path, json=TURN)).json() == {"preferred": "b"}
