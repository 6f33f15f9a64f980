"""Clusters over the admin listener: their endpoints and how they decide, shown and changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.background_task import in_slices
from kvproxy.base.errors import Problem
from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.paths import dotted_path
from kvproxy.base.types import EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.entries import CREDENTIALS
from kvproxy.operate.admin.cache_status import endpoint_index, engine_status
from kvproxy.operate.admin.replies import Audit, RequestRefused, encode_part, read_json_object, reply_json
from kvproxy.operate.config.decode import decode_model, spelling_hint
from kvproxy.operate.runtime.operated import AdminTarget


def describe_endpoint(operated: AdminTarget, cluster: str, endpoint: Endpoint) -> dict[str, object]:
    """Return the state of one endpoint: load, health, and its engine's report."""
    status = endpoint.status(operated.clock())
    if operated.kvcache is not None:
        status["engine"] = engine_status(operated.kvcache, endpoint)
        status["cache"] = endpoint_index(operated.kvcache, cluster, endpoint)
    return status


class EndpointRoutes:
    """List, add, drain, undrain, weigh and remove."""

    def __init__(self, operated: AdminTarget, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit

    def list_routes(self) -> list[Route]:
        """Their paths."""
        one = "/endpoints/{cluster}/{id:path}"
        return [
            Route("/endpoints", self._collection, methods=["GET", "POST"]),
            Route(f"{one}/drain", self._drain, methods=["POST"]),
            Route(f"{one}/undrain", self._drain, methods=["POST"]),
            Route(f"{one}/weight", self._weight, methods=["POST"]),
            Route(one, self._remove, methods=["DELETE"]),
        ]

    async def _collection(self, request: Request) -> Response:
        return await self._add(request) if request.method == "POST" else await self._list()

    async def _list(self) -> Response:
        clusters: dict[str, list[msgspec.Raw]] = {}
        for name, cluster in list(self._operated.clusters.items()):
            leaving = [
                {**each.status(self._operated.clock()), "leaving": True}
                for each in cluster.members.departures.endpoints
            ]
            described = (describe_endpoint(self._operated, name, each) for each in cluster.endpoints)
            clusters[name] = [encode_part(one) async for one in in_slices(chain(described, leaving))]
        failing = {name: dict(one.poller.complaints) for name, one in self._operated.clusters.items()}
        return reply_json(
            {"clusters": clusters, "failing_discovery": {name: why for name, why in failing.items() if why}}
        )

    async def _add(self, request: Request) -> Response:
        body = await read_json_object(request)
        cluster = find_cluster(self._operated.clusters, body.pop("cluster", None))
        endpoint = _decoded(body)
        if cluster.members.find_named(EndpointId(endpoint.id)):
            raise RequestRefused(
                409, Problem("id", f"{cluster.name} has an endpoint {endpoint.id!r}", "remove it first")
            )
        if not cluster.operator.add_endpoint(endpoint):
            raise RequestRefused(409, Problem("id", "too many endpoints were added already", "remove some"))
        self._audit.write_line(request, "endpoint.add", cluster=cluster.name, endpoint=endpoint.id, url=endpoint.url)
        return self._status_of(cluster, endpoint.id, 201)

    async def _drain(self, request: Request) -> Response:
        await read_json_object(request, optional=True)
        cluster, name, endpoints = self.find_named(request)
        draining = not request.url.path.endswith("/undrain")
        before = all(endpoint.draining for endpoint in endpoints)
        cluster.operator.drain_endpoint(name, draining=draining)
        action = "endpoint.drain" if draining else "endpoint.undrain"
        self._audit.write_line(request, action, cluster=cluster.name, endpoint=name, was_draining=before)
        return self._status_of(cluster, name)

    async def _weight(self, request: Request) -> Response:
        body = await read_json_object(request)
        cluster, name, endpoints = self.find_named(request)
        unknown = [Problem(key, "unknown key", spelling_hint(key, ["weight"])) for key in body if key != "weight"]
        weight = body.get("weight")
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight <= 1000:
            unknown.append(Problem("weight", "must be a number", "allowed: more than 0, at most 1000"))
        if unknown:
            raise RequestRefused(422, *unknown)
        assert isinstance(weight, int | float)
        before = endpoints[0].weight
        cluster.operator.reweight_endpoint(name, float(weight))
        where = {"cluster": cluster.name, "endpoint": name}
        self._audit.write_line(request, "endpoint.weight", **where, before=before, after=float(weight))
        return self._status_of(cluster, name)

    async def _remove(self, request: Request) -> Response:
        await read_json_object(request, optional=True)
        cluster, name, endpoints = self.find_named(request)
        in_flight = sum(endpoint.load.in_flight for endpoint in endpoints)
        cluster.operator.remove_endpoint(name)
        self._audit.write_line(request, "endpoint.remove", cluster=cluster.name, endpoint=name, in_flight=in_flight)
        return reply_json({"removed": name, "cluster": cluster.name, "in_flight": in_flight})

    def find_named(self, request: Request) -> tuple[Cluster, EndpointId, Sequence[Endpoint]]:
        """Return what the path names: an endpoint, or the engine of several, one a data-parallel rank. Raises
        RequestRefused."""
        cluster = find_cluster(self._operated.clusters, request.path_params["cluster"])
        name = EndpointId(request.path_params["id"])
        endpoints = cluster.members.find_named(name)
        if not endpoints:
            known = spelling_hint(name, [each.id for each in cluster.endpoints])
            raise RequestRefused(404, Problem("id", f"{cluster.name} has no endpoint {name[:128]!r}", known))
        return cluster, name, endpoints

    def _status_of(self, cluster: Cluster, name: str, status: int = 200) -> Response:
        endpoints = cluster.members.find_named(EndpointId(name))
        described = [describe_endpoint(self._operated, cluster.name, each) for each in endpoints]
        if [each.id for each in endpoints] == [name]:
            return reply_json(described[0], status)
        in_flight = sum(endpoint.load.in_flight for endpoint in endpoints)
        return reply_json({"id": name, "in_flight": in_flight, "ranks": described}, status)


def find_cluster(clusters: Mapping[str, Cluster], name: Any) -> Cluster:
    """Return the named cluster, or the only one; RequestRefused when there is none."""
    if name is None and len(clusters) == 1:
        return next(iter(clusters.values()))
    cluster = clusters.get(name) if isinstance(name, str) else None
    if cluster is None:
        what = "required, since there are several" if name is None else "there is no such cluster"
        raise RequestRefused(422 if name is None else 404, Problem("cluster", what, f"clusters: {', '.join(clusters)}"))
    return cluster


def _decoded(body: dict[str, Any]) -> EndpointSettings:
    """Return the endpoint; RequestRefused with every problem. Files are named in the configuration only: a caller of
    this listener must not learn by it what other files hold."""
    problems = [
        Problem(key, "files cannot be named here", "write it out, or add the endpoint to the configuration")
        for key in CREDENTIALS
        if isinstance(body.get(key), dict) or (key != "api_key" and body.get(key))
    ]
    if problems:
        raise RequestRefused(422, *problems)
    decoded = decode_model(EndpointSettings, body, dotted_path)
    endpoint: EndpointSettings | None = decoded.value
    problems = decoded.problems
    if not problems and endpoint is not None and (fault := url_fault(endpoint.url)):
        problems = [Problem("url", fault, "http://host:port")]
    if problems or endpoint is None:
        raise RequestRefused(422, *problems)
    return endpoint


def describe_routing(cluster: Cluster, now: float) -> dict[str, object]:
    """Policy, what it learned, and the router queue (None: there is none)."""
    policy = cluster.policies.own.policy
    queue = cluster.queue
    return {
        "policy": cluster.settings.policy.value,
        "learned": policy.estimates(now),
        "adapters": cluster.adapters.estimates(),
        "queue": None if queue is None else queue.status(now),
    }


class RoutingRoutes:
    """Each cluster's policy and what it learned."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [Route("/routing", self._routing, methods=["GET"])]

    async def _routing(self, request: Request) -> Response:
        now = self._operated.clock()
        return reply_json(
            {"clusters": {name: describe_routing(one, now) for name, one in self._operated.clusters.items()}}
        )
