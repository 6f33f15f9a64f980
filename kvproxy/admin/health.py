"""What load balancers and Prometheus ask for."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvproxy.admin.operated import Operated
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition
from kvproxy.metrics.exposition import exposition

TAKING = (Condition.UP, Condition.SATURATED)


def readiness(operated: Operated) -> tuple[bool, str]:
    """Ready while not draining and while some endpoint of every cluster takes traffic; and why not."""
    if operated.draining:
        return False, "draining"
    now = operated.clock()
    without = sorted(name for name, cluster in operated.clusters.items() if not _available(cluster, now))
    return (False, f"no endpoint in {', '.join(without)}") if without else (True, "ready")


class HealthRoutes:
    """`/healthz`, `/readyz` and `/metrics`, as plain text."""

    def __init__(self, operated: Operated) -> None:
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


def _available(cluster: Cluster, now: float) -> bool:
    return any(endpoint.condition(now) in TAKING for endpoint in cluster.endpoints)
