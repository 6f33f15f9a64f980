"""Placement alone: the proxy reports where a request should go, and another program carries it there."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.base.types import InferenceRequest
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routes import RouteTarget
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.screening import Refusal
from kvproxy.operate.admin.operated import AdminTarget
from kvproxy.operate.admin.pick_request import Question, parse_question, parse_report
from kvproxy.operate.admin.replies import RequestRefused, read_json_object, reply_json
from kvproxy.proxy.external import ExternalPlacement, rank_headers
from kvproxy.proxy.filters.kvcache import prefers
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.reservations import PickReservation, Reservations


class PickRoutes:
    """`/pick`, and what becomes of the places it reserved."""

    def __init__(self, operated: AdminTarget, *, reservations: Reservations | None = None) -> None:
        self._operated = operated
        if reservations is None:  # an empty one is false
            reservations = Reservations(metrics=operated.metrics, clock=operated.clock)
        self._held = reservations

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/pick", self._pick, methods=["POST"]),
            Route("/pick/{id}/first_token", self._first_token, methods=["POST"]),
            Route("/pick/{id}/done", self._done, methods=["POST"]),
        ]

    async def _pick(self, request: Request) -> Response:
        operated = self._operated
        question, body, inference = await parse_question(request, most_bytes=operated.config.limits.body)
        target = operated.routes.resolve(question.path, inference.model)
        if target is None:
            raise RequestRefused(
                404, Problem("request.model", "no route leads there", "GET /endpoints shows the clusters")
            )
        _check_policy(question, target.cluster)
        facts = await self._facts_for(inference, body, target)
        if question.reserve and self._held.full:
            raise RequestRefused(
                429, Problem("reserve", "too many reservations are open", "settle them with /pick/ID/done")
            )
        placement = self._placement(question, inference, facts, target)
        now = operated.clock()
        decision = placement.decide(now)
        pick = placement.take(decision, now) if question.reserve else None
        if isinstance(decision, Refusal):
            raise _refused(decision)
        shown = _shown(decision, target.cluster)
        if pick is None:
            return reply_json(shown)
        service = operated.kvcache
        held = self._held.hold_pick(target.cluster, pick, service=service, facts=facts, lease_s=question.lease_s)
        shown["reservation"] = {"id": held.id, "lease_s": question.lease_s}
        return reply_json(shown, 201)

    def _placement(
        self, question: Question, inference: InferenceRequest, facts: RequestFacts | None, target: RouteTarget
    ) -> ExternalPlacement:
        clock = self._operated.clock
        service = self._operated.kvcache
        exchange = Exchange(received_at=clock(), policy=question.policy)
        exchange.inference = msgspec.structs.replace(inference, stream=question.first_token)
        if facts is not None and service is not None:
            exchange.facts = facts.overlaps
            exchange.preferred = facts.preferred if prefers(service.settings, target.cluster.settings.policy) else None
        model = target.upstream_model or inference.model
        return ExternalPlacement(exchange=exchange, cluster=target.cluster, clock=clock, model=model)

    async def _facts_for(self, inference: InferenceRequest, body: bytes, target: RouteTarget) -> RequestFacts | None:
        service = self._operated.kvcache
        if service is None:
            return None
        return await service.facts_for(inference, body, cluster=target.cluster, model=target.upstream_model)

    async def _first_token(self, request: Request) -> Response:
        await read_json_object(request, optional=True)
        if not self._held.first_token(request.path_params["id"]):
            raise _unknown()
        return reply_json({"first_token": True})

    async def _done(self, request: Request) -> Response:
        ended = await parse_report(request)
        held: PickReservation | None = self._held.end_pick(request.path_params["id"], ended)
        if held is None:
            raise _unknown()
        return reply_json({"endpoint": held.pick.endpoint.id, "outcome": ended.outcome.value})


def _check_policy(question: Question, cluster: Cluster) -> None:
    offered = tuple(cluster.policies.named)
    if question.policy and question.policy not in offered:
        fix = f"on offer: {', '.join(offered)}" if offered else "clusters.NAME.client_policies lists the permitted ones"
        raise RequestRefused(422, Problem("policy", "this cluster does not offer that policy", fix))


def _refused(refusal: Refusal) -> RequestRefused:
    status = 404 if refusal is Refusal.MODEL_NOT_SERVED else 503
    return RequestRefused(
        status, Problem("endpoint", f"no endpoint can take this request: {refusal.value}", "GET /endpoints shows why")
    )


def _unknown() -> RequestRefused:
    return RequestRefused(404, Problem("id", "there is no such reservation", "it was settled, or its lease ran out"))


def _shown(decision: Decision[Endpoint], cluster: Cluster) -> dict[str, object]:
    request = decision.request
    costs = decision.costs
    facts = request.facts
    endpoint = decision.endpoint
    return {
        "cluster": cluster.name,
        "endpoint": endpoint.id,
        "url": str(endpoint.origin),
        "headers": rank_headers(endpoint),
        "model": request.model,
        "policy": decision.policy,
        "reason": decision.reason,
        "prompt_tokens": facts.prompt_tokens or None,
        "matched_tokens": _matched(facts, endpoint),
        "candidates": [
            _candidate(each, facts, costs[index] if costs else None) for index, each in enumerate(decision.candidates)
        ],
        "reservation": None,
    }


def _matched(facts: OverlapFacts, endpoint: Endpoint) -> int | None:
    return facts.matched_tokens(endpoint.id) if facts.searched else None


def _candidate(endpoint: Endpoint, facts: OverlapFacts, cost: float | None) -> dict[str, object]:
    overlap = facts.by_endpoint.get(endpoint.id)
    return {
        "endpoint": endpoint.id,
        "url": str(endpoint.origin),
        "matched_tokens": _matched(facts, endpoint),
        "source": None if overlap is None else overlap.source.value,
        "cost": cost,
    }
