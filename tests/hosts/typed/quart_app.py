"""A Quart app with the middleware."""

from quart import Quart, request

import kvproxy
from kvproxy import KVCacheMiddleware

ENGINES = {"a": "http://127.0.0.1:8000"}
app = Quart("app")
middleware = KVCacheMiddleware(app.asgi_app, endpoints=ENGINES)
app.asgi_app = middleware  # type: ignore[method-assign]


@app.before_serving
async def start() -> None:
    assert middleware.status()["running"]


@app.post("/v1/chat/completions")
async def chat() -> dict[str, str | None]:
    await request.get_data()
    return {"engine": await kvproxy.choose(request), "preferred": kvproxy.preferred(request.scope)}
