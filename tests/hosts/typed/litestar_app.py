"""A Litestar app with the middleware around it and the proxy mounted."""

from litestar import Litestar, Request, asgi, post
from litestar.datastructures import State
from litestar.types import Receive, Scope, Send

import kvproxy
from kvproxy import KVCacheMiddleware, Proxy

ENGINES = {"a": "http://127.0.0.1:8000"}
proxy = Proxy({"endpoints": ENGINES})


@post("/v1/chat/completions")
async def chat(request: Request[object, object, State]) -> dict[str, str | None]:
    await request.body()
    return {"engine": await kvproxy.choose(request), "preferred": kvproxy.preferred(request.scope)}


@asgi("/llm", is_mount=True, copy_scope=True)
async def llm(scope: Scope, receive: Receive, send: Send) -> None:
    await proxy(scope, receive, send)


app = KVCacheMiddleware(Litestar(route_handlers=[chat, llm]), endpoints=ENGINES)
