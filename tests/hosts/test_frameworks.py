"""KVCacheMiddleware in other frameworks: around their apps at the root and below a prefix, and in each framework's own
forms."""

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
CHAT = "/v1/chat/completions"
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


def django(path: str, *, sync: bool = False) -> Any:
    module = pytest.importorskip("django")
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import JsonResponse
    from django.urls import path as route

    def answer(request: Any) -> Any:
        assert request.body
        return JsonResponse(note(request.scope))

    async def chat(request: Any) -> Any:
        return answer(request)

    if not settings.configured:
        settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x", MIDDLEWARE=[])
        module.setup()
    from django.urls import clear_url_caches

    clear_url_caches()
    globals()["urlpatterns"] = [route(path.removeprefix("/"), answer if sync else chat)]
    return get_asgi_application()


FRAMEWORKS: tuple[Make, ...] = (plain, starlette, fastapi, quart, litestar, falcon, blacksheep, django)


@pytest.mark.parametrize("path", [CHAT, "/llm/v1/chat/completions"])
@pytest.mark.parametrize("make", FRAMEWORKS, ids=lambda make: make.__name__)
async def test_the_second_turn_is_known(make: Make, path: str) -> None:
    """A request is followed to where it was served, whatever the framework does with its scope and body."""
    app = make(path)
    start = getattr(app, "start", None)
    if make is blacksheep and start is not None:
        await start()
    middleware = KVCacheMiddleware(app, endpoints=ENGINES)
    async with middleware:
        await check_two_turns(middleware, path)


async def check_two_turns(app: Any, path: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:
        first = await http.post(path, json=TURN)
        assert first.status_code == 200, first.text
        assert first.json() == {"preferred": None}
        assert (await http.post(path, json=TURN)).json() == {"preferred": "b"}


def starlette_list() -> Any:
    """As an entry of the app's own list."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware

    return Starlette(routes=starlette(CHAT).routes, middleware=[Middleware(KVCacheMiddleware, endpoints=ENGINES)])


def starlette_above_a_mount() -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    app = Starlette(routes=[Mount("/llm", app=starlette(CHAT))])
    app.add_middleware(KVCacheMiddleware, endpoints=ENGINES)
    return app


def starlette_in_a_mount() -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount("/llm", app=KVCacheMiddleware(starlette(CHAT), endpoints=ENGINES))])


def starlette_route() -> Any:
    """Of one route."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    (route,) = starlette(CHAT).routes
    middleware = [Middleware(KVCacheMiddleware, endpoints=ENGINES)]
    return Starlette(routes=[Route(CHAT, route.endpoint, methods=["POST"], middleware=middleware)])


def fastapi_added() -> Any:
    app = fastapi(CHAT)
    app.add_middleware(KVCacheMiddleware, endpoints=ENGINES)
    return app


def fastapi_router() -> Any:
    """Of a router with a prefix."""
    from fastapi import APIRouter, FastAPI

    router = APIRouter(prefix="/llm")
    router.include_router(fastapi(CHAT).router)
    app = FastAPI()
    app.include_router(router)
    app.add_middleware(KVCacheMiddleware, endpoints=ENGINES)
    return app


def fastapi_root_path() -> Any:
    """Of an app that is told its prefix."""
    app = fastapi(CHAT)
    app.root_path = "/llm"
    app.add_middleware(KVCacheMiddleware, endpoints=ENGINES)
    return app


def litestar_defined() -> Any:
    module = pytest.importorskip("litestar")
    from litestar.middleware import DefineMiddleware

    async def chat(request: Any) -> dict[str, Any]:
        await request.body()
        return note(request)

    chat.__annotations__ = {"request": module.Request, "return": dict}
    handler = module.post(CHAT, status_code=200)(chat)
    return module.Litestar([handler], middleware=[DefineMiddleware(KVCacheMiddleware, endpoints=ENGINES)])


def quart_inside() -> Any:
    """Around the app that Quart has inside."""
    app = quart(CHAT)
    app.asgi_app = KVCacheMiddleware(app.asgi_app, endpoints=ENGINES)
    return app


def django_sync() -> Any:
    """Around a view in a thread."""
    return KVCacheMiddleware(django(CHAT, sync=True), endpoints=ENGINES)


#: Forms and the paths of their chats.
FORMS: dict[Callable[[], Any], str] = {
    starlette_list: CHAT,
    starlette_above_a_mount: "/llm" + CHAT,
    starlette_in_a_mount: "/llm" + CHAT,
    starlette_route: CHAT,
    fastapi_added: CHAT,
    fastapi_router: "/llm" + CHAT,
    fastapi_root_path: "/llm" + CHAT,
    litestar_defined: CHAT,
    quart_inside: CHAT,
    django_sync: CHAT,
}


@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
async def test_in_the_frameworks_own_form_the_second_turn_is_known(make: Callable[[], Any]) -> None:
    """Without lifespan events: the first request starts it."""
    await check_two_turns(make(), FORMS[make])
