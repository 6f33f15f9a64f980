"""A Starlette app with the middleware and the proxy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import kvproxy
from kvproxy import KVCacheMiddleware, Proxy

ENGINES = {"a": "http://127.0.0.1:8000"}
proxy = Proxy({"endpoints": ENGINES}, tenant=lambda scope: str(scope["state"].get("team", "")))


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with proxy:
        yield


async def chat(request: Request) -> JSONResponse:
    await request.body()
    engine = await kvproxy.choose(request)
    if engine is None:
        return JSONResponse({"matches": dict(kvproxy.matches(request))}, 503)
    kvproxy.served(request, engine)
    kvproxy.failed(request)
    return JSONResponse({"engine": engine, "preferred": kvproxy.preferred(request)})


async def scale(request: Request) -> JSONResponse:
    proxy.add_endpoint("b", "http://127.0.0.1:8001", models=["m"])
    left: int = await proxy.remove_endpoint("a", drain=30)
    return JSONResponse({"left": left, "status": proxy.status()})


app = Starlette(
    routes=[
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/scale", scale, methods=["POST"]),
        Mount("/llm", proxy),
        Mount("/metrics", proxy.metrics_app),
        Mount("/kvproxy", proxy.admin),
    ],
    middleware=[Middleware(KVCacheMiddleware, endpoints=ENGINES, limit_bytes="32MiB")],
    lifespan=lifespan,
)
