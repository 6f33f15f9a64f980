"""The operator's listener: metrics, health and status. Never reachable through the public one."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock

#: Health is asked for by load balancers, which carry no token.
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class BearerToken:
    """Refuses requests without the admin token."""

    def __init__(self, app: ASGIApp, *, token: SecretStr) -> None:
        self.app = app
        self._expected = b"Bearer " + token.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = JSONResponse({"error": "admin token required"}, 401, {"www-authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


class AdminApp:
    """Answers from the running clusters; `ready` says whether new requests are taken."""

    def __init__(
        self, clusters: Mapping[str, Cluster], *, metrics: Metrics, ready: Callable[[], bool], clock: Clock
    ) -> None:
        self._clusters = clusters
        self._metrics = metrics
        self._ready = ready
        self._clock = clock

    def build(self, token: SecretStr | None) -> ASGIApp:
        """The ASGI app, behind `token` when there is one."""
        routes = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._exposition),
            Route("/endpoints", self._endpoints),
        ]
        middleware = [Middleware(BearerToken, token=token)] if token is not None else []
        return Starlette(routes=routes, middleware=middleware)

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        """Ready while not draining and while some endpoint of every cluster takes traffic."""
        without = [name for name, cluster in self._clusters.items() if not self._available(cluster)]
        if not self._ready():
            return PlainTextResponse("draining\n", 503)
        if without:
            return PlainTextResponse(f"no endpoint in {', '.join(sorted(without))}\n", 503)
        return PlainTextResponse("ready\n")

    def _available(self, cluster: Cluster) -> bool:
        now = self._clock()
        return any(endpoint.condition(now) in (Condition.UP, Condition.SATURATED) for endpoint in cluster.endpoints)

    async def _exposition(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _endpoints(self, request: Request) -> Response:
        clusters: dict[str, Any] = {
            name: [e.status(self._clock()) for e in cluster.endpoints] for name, cluster in self._clusters.items()
        }
        return JSONResponse({"clusters": clusters})
