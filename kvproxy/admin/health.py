"""What load balancers and Prometheus ask for."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvproxy.admin.operated import AdminTarget
from kvproxy.cluster.status import clusters_without_endpoint
from kvproxy.metrics.exposition import exposition


def readiness(operated: AdminTarget) -> tuple[bool, str]:
    """Ready while not draining and while some endpoint of every cluster takes traffic; and why not."""
    if operated.draining:
        return False, "draining"
    without = clusters_without_endpoint(operated.clusters, operated.clock())
    return (False, f"no endpoint in {', '.join(without)}") if without else (True, "ready")


class HealthRoutes:
    """`/healthz`, `/readyz` and `/metrics`, as plain text."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        ready, text = readiness(self._operated)
        return PlainTextResponse(f"{text}\n", 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(await exposition(self._operated.metrics.registry), media_type=CONTENT_TYPE_LATEST)
