"""A plain Starlette gateway that asks kvproxy which engine to use: `uvicorn app:app` in this folder.

The middleware says which engine holds most of the prompt; the gateway decides, forwards, and tells which one it used.
"""

from __future__ import annotations

import itertools
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

from kvproxy import KVCacheMiddleware, preferred, served

ENGINES = {
    "a": os.environ.get("ENGINE_A", "http://127.0.0.1:8000"),
    "b": os.environ.get("ENGINE_B", "http://127.0.0.1:8001"),
}
SETTINGS = {"lmcache_endpoint": os.environ.get("LMCACHE", "")}


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, object]]:
    """One client for all requests."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:  # noqa: S113 - a stream has no total time
        yield {"client": client, "turn": itertools.cycle(ENGINES)}


async def chat(request: Request) -> StreamingResponse:
    """To the engine that holds most of this prompt, else to the next one."""
    engine = preferred(request) or next(request.state.turn)
    served(request, engine)
    upstream = request.state.client.build_request(
        "POST",
        ENGINES[engine] + request.url.path,
        content=await request.body(),
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
