"""Requests that other programs carry: their placement, and the form of the answer, for `/pick` and Envoy alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kvproxy.base.errors import QueueFull
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Headers
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routes import Routes
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.screening import Refusal
from kvproxy.proxy.filters.chain import RequestGuard
from kvproxy.proxy.forward.headers import RANK_HEADER
from kvproxy.proxy.placement import NO_ENDPOINTS, Placement
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver
from kvproxy.proxy.request.session import NO_CALLER, Caller, SessionHeaders
from kvproxy.proxy.settings import ServingSettings

_MAX_ID_BYTES = 128
_MESSAGES = {
    404: "No engine serves this model.",
    429: "The engines are at capacity; try again later.",
    503: "No engine can take this request now.",
}


class PlacerTarget(Protocol):
    """The running proxy, as far as requests that others carry need it. Asked again for every request: a reload may have
    replaced any part."""

    @property
    def config(self) -> ServingSettings: ...
    @property
    def routes(self) -> Routes: ...
    @property
    def clusters(self) -> Mapping[str, Cluster]: ...
    @property
    def kvcache(self) -> KvCache | None: ...
    @property
    def guards(self) -> Sequence[RequestGuard]: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def observers(self) -> Sequence[RequestObserver]: ...


class ExternalPlacement(Placement, kw_only=True):
    """Placement of a request that another program carries."""

    priority: int = 0

    def level(self) -> int:
        return self.priority


def rank_headers(endpoint: Endpoint) -> dict[str, str]:
    """Return what the request has to carry to be served there: the data-parallel rank, where that is what was
    chosen."""
    return {} if endpoint.rank is None else {RANK_HEADER.decode(): str(endpoint.engine.ranks.number(endpoint.rank))}


def engine_headers(exchange: Exchange, endpoint: Endpoint) -> dict[str, str]:
    """Return headers that the request has to carry there: the rank, and an id of ours where a guard wants one."""
    headers = rank_headers(endpoint)
    if exchange.upstream_id:
        headers["x-request-id"] = exchange.upstream_id
    return headers


def address_of(endpoint: Endpoint) -> str:
    """`host:port`, as Envoy names an endpoint."""
    host = endpoint.origin.host
    return f"[{host}]:{endpoint.origin.port}" if ":" in host else f"{host}:{endpoint.origin.port}"


def list_endpoints(cluster: Cluster, asked: PickRequest, chosen: Endpoint, now: float, *, most: int) -> list[Endpoint]:
    """Return the chosen endpoint, and up to `most` to go to if it cannot be reached, in order: each is where the same
    decision leads without those before it. One at the same address, or of another rank number, is none."""
    found = [chosen]
    excluded = asked.excluded | {chosen.id}
    while len(found) <= most:
        verdict = cluster.decide(msgspec.structs.replace(asked, excluded=excluded, preferred=None), now)
        if isinstance(verdict, Refusal):
            break
        excluded |= {verdict.endpoint.id}
        known = address_of(verdict.endpoint) in map(address_of, found)
        if not known and rank_headers(verdict.endpoint) == rank_headers(chosen):
            found.append(verdict.endpoint)
    return found


def read_headers(headers: Headers, sessions: SessionHeaders) -> tuple[Caller, bool, str]:
    """Return the caller, whether the body is compressed, and the request's id."""
    said = {}
    encoded = False
    request_id = b""
    for name, value in headers:
        if name in sessions.names:
            said[name] = value
        elif name == b"content-encoding":
            encoded = value.strip().lower() not in (b"", b"identity")
        elif name == b"x-request-id":
            request_id = value[:_MAX_ID_BYTES]
    return sessions.read(said) if said else NO_CALLER, encoded, request_id.decode("latin-1")


def outside_subset(subset: frozenset[str] | None, cluster: Cluster) -> frozenset[EndpointId]:
    """Endpoints that may not be picked, since neither their address nor their host is named; None: any may."""
    if subset is None:
        return NO_ENDPOINTS
    return frozenset(
        each.id for each in cluster.endpoints if address_of(each) not in subset and each.origin.host not in subset
    )


def refusal_reply(refusal: Refusal, outside: frozenset[EndpointId]) -> LocalReply:
    """Return what the client gets where no endpoint may take its request."""
    if refusal is Refusal.MODEL_NOT_SERVED:
        return LocalReply(404, refusal.value, _MESSAGES[404])
    if refusal is Refusal.SATURATED:
        return shed_reply(429, refusal.value)
    return shed_reply(503, "subset" if outside and refusal is Refusal.ALL_TRIED else refusal.value)


def full_reply(full: QueueFull) -> LocalReply:
    """Return what the client gets where no place to wait is left."""
    return shed_reply(429, "queue_full", math.ceil(full.retry_after_s))


def shed_reply(status: int, reason: str, retry_after_s: int = 1) -> LocalReply:
    """Return the reply that asks the client to retry later."""
    return LocalReply(status, reason, _MESSAGES[status], headers=[(b"retry-after", b"%d" % retry_after_s)])
