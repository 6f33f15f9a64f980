"""`POST /endpoints/CLUSTER/ID/move`: streams of a drained endpoint go on elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.resume.running import RunningStreams
from kvproxy.operate.admin.clusters import EndpointRoutes
from kvproxy.operate.admin.replies import Audit, RequestRefused, read_json_object, reply_json
from kvproxy.operate.runtime.operated import AdminTarget


class MoveRoutes:
    """Moves what can be moved; the rest is finished by the endpoint."""

    def __init__(self, operated: AdminTarget, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit
        self._endpoints = EndpointRoutes(operated, audit)

    def list_routes(self) -> list[Route]:
        """Their path."""
        return [Route("/endpoints/{cluster}/{id:path}/move", self._move, methods=["POST"])]

    async def _move(self, request: Request) -> Response:
        await read_json_object(request, optional=True)
        cluster, name, endpoints = self._endpoints.find_named(request)
        if not all(endpoint.draining for endpoint in endpoints):
            fix = f"POST /endpoints/{cluster.name}/{name}/drain first"
            raise RequestRefused(409, Problem("id", f"{name!r} is not drained: streams might come back to it", fix))
        moved, staying = await self._move_streams(cluster, endpoints)
        self._audit.write_line(request, "endpoint.move", cluster=cluster.name, endpoint=name, moved=moved)
        return reply_json({"id": name, "cluster": cluster.name, "moved": moved, "staying": staying})

    async def _move_streams(self, cluster: Cluster, endpoints: Sequence[Endpoint]) -> tuple[int, dict[str, int]]:
        """Return how many move, and how many stay by reason. Each has a turn of its own: a plan of a long prompt takes
        a while."""
        results = Counter[str | None]()
        for endpoint in endpoints:
            for stream in RunningStreams.of(endpoint).list_streams():
                if cluster.screening.may_serve(stream.model, self._operated.clock()):
                    results[stream.move()] += 1
                else:
                    results["no_endpoint"] += 1
                await asyncio.sleep(0)
        return results[""], {why: count for why, count in sorted(results.items(), key=str) if why}
