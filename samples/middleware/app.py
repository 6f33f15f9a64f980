"""A plain Starlette gateway that asks kvproxy which engine to use: `uvicorn app:app` in this folder.

The middleware chooses the engine by what each holds of the prompt and has to do; the gateway forwards.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvproxy import KVCacheMiddleware, choose

ENGINES = {
    "a": os.environ.get("ENGINE_A", "http://127.0.0.1:8000"),
    "b": os.environ.get("ENGINE_B", "http://127.0.0.1:8001"),
}
SETTINGS = {"lmcache_endpoint": os.environ.get("LMCACHE", "")}


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, object]]:
    """One client for all requests."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:  # noqa: S113 - a stream has no total time
        yield {"client": client}


async def chat(request: Request) -> StreamingResponse:
    """To the engine that costs this request, and the others, least."""
    content = await request.body()
    engine = await choose(request)
    assert engine is not None  # all are tried while none is known to be down
    upstream = request.state.client.build_request(
        "POST",
        ENGINES[engine] + request.url.path,
        content=content,
        headers={"content-type": "application/json"},
    )
    answer = await request.state.client.send(upstream, stream=True)
    return StreamingResponse(
        answer.aiter_raw(),
        status_code=answer.status_code,
        headers={"content-type": answer.headers.get("content-type", "application/json"), "x-engine": engine},
        background=BackgroundTask(answer.aclose),
    )


app = Starlette(
    routes=[Route("/v1/chat/completions", chat, methods=["POST"])],
    middleware=[Middleware(KVCacheMiddleware, endpoints=ENGINES, settings=SETTINGS)],
    lifespan=lifespan,
)
