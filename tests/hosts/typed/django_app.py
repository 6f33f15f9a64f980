"""A Django project's asgi.py with the middleware around it, and a view."""

from django.core.asgi import get_asgi_application  # type: ignore[import-untyped]
from django.core.handlers.asgi import ASGIRequest  # type: ignore[import-untyped]
from django.http import JsonResponse  # type: ignore[import-untyped]

import kvproxy
from kvproxy import KVCacheMiddleware

application = KVCacheMiddleware(get_asgi_application(), endpoints={"a": "http://127.0.0.1:8000"})


async def chat(request: ASGIRequest) -> JsonResponse:
    engine = await kvproxy.choose(request)
    return JsonResponse({"engine": engine, "preferred": kvproxy.preferred(request.scope)})
