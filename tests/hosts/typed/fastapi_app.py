"""A FastAPI app with the middleware and the proxy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request

import kvproxy
from kvproxy import KVCacheMiddleware, Proxy

ENGINES = {"a": "http://127.0.0.1:8000"}
proxy = Proxy({"endpoints": ENGINES})


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with proxy:
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(KVCacheMiddleware, endpoints=ENGINES, paths=["/v1/chat/completions"])
app.mount("/llm", proxy)
app.mount("/kvproxy", proxy.admin)


@app.post("/v1/chat/completions")
async def chat(request: Request) -> dict[str, str | None]:
    await request.body()
    return {"engine": await kvproxy.choose(request, exclude=["b"]), "preferred": kvproxy.preferred(request)}
