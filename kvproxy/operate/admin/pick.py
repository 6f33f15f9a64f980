"""Placement alone: the proxy reports where a request should go, and another program carries it there."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.base.installed import installed
from kvproxy.base.json_scan import MAX_DECODED_BYTES, Edit, Unreadable, apply_edits, find_members, run_in_turns
from kvproxy.base.types import InferenceRequest
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routes import RouteTarget
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.screening import Refusal
from kvproxy.operate.admin.replies import RequestRefused, read_json_object, receive_body, reply_json
from kvproxy.operate.config.decode import spelling_hint
from kvproxy.operate.feature import Feature
from kvproxy.operate.placing.carried import CarriedRequest, Placer
from kvproxy.operate.placing.external import ExternalPlacement, engine_headers
from kvproxy.operate.placing.reservations import MAX_RESERVATIONS, QUEUE
from kvproxy.operate.runtime.operated import AdminTarget
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import read_body
from kvproxy.proxy.request.session import Caller, Session, bounded_key
from kvproxy.proxy.request.usage import MAX_COUNT

DEFAULT_PATH = "/v1/chat/completions"
_MAX_REST_BYTES = 64 * 1024
DEFAULT_LEASE_S = 60.0
MAX_LEASE_S = 3600.0


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /pick`; `request` is what the engine will be sent, to the byte."""

    request: msgspec.Raw
    path: str = DEFAULT_PATH
    session: str = ""  # its key; takes precedence over the body
    policy: str = ""  # one of the cluster's client_policies
    reserve: bool = False
    lease_s: float = DEFAULT_LEASE_S
    first_token: bool = False  # the caller will report the first token


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /pick/ID/done`."""

    status: int = 200  # status of the engine's answer; 0: no answer
    cancelled: bool = False  # the client left
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


async def parse_question(request: Request, *, most_bytes: int) -> tuple[Question, bytes, InferenceRequest]:
    """Return the question, the raw inference body in it, and that parsed. RequestRefused with what is wrong."""
    question, body = await _question(await receive_body(request, most=most_bytes))
    kind = KIND_OF_PATH.get(question.path)
    if kind is None:
        hint = spelling_hint(question.path, KIND_OF_PATH) or f"known: {', '.join(KIND_OF_PATH)}"
        raise RequestRefused(422, Problem("path", "not an inference path", hint))
    if not 0 < question.lease_s <= MAX_LEASE_S:
        raise RequestRefused(
            422, Problem("lease_s", "not a possible lease", f"allowed: more than 0, at most {MAX_LEASE_S:g}")
        )
    session = Session(bounded_key(question.session)) if question.session else None
    inference = await read_body(kind, body, caller=Caller(session), pace=asyncio.Lock())
    if inference is None:
        raise RequestRefused(422, Problem("request", "not a body of this path", "the body for the engine"))
    return question, body, inference


async def _question(body: bytes) -> tuple[Question, bytes]:
    """Return the question and the request in it; a long one is cut out in steps."""
    if len(body) <= MAX_DECODED_BYTES:
        question = _decoded(body, Question)
        return question, bytes(question.request)
    pace = asyncio.Lock()
    try:
        found = (await run_in_turns(find_members(body, "request".__eq__), pace)).found
    except Unreadable as broken:
        raise RequestRefused(400, Problem("(body)", str(broken), _form(Question))) from None
    rest = await run_in_turns(apply_edits(body, [Edit(*each.value, b"null") for each in found]), pace)
    if len(rest) > _MAX_REST_BYTES:
        raise RequestRefused(
            413, Problem("(body)", f"larger than {_MAX_REST_BYTES} bytes without `request`", "send less")
        )
    question = _decoded(rest, Question)
    start, end = found[-1].value
    return question, await run_in_turns(apply_edits(body, [Edit(0, start), Edit(end, len(body))]), pace)


async def _parse_report(request: Request) -> Report:
    """How the request went; an empty body is a good answer. RequestRefused with what is wrong."""
    report: Report = _decoded(await receive_body(request) or b"{}", Report)
    problems = [
        Problem(name, "not a number of tokens", "a whole number from 0 on")
        for name in ("prompt_tokens", "cached_tokens")
        if not 0 <= (getattr(report, name) or 0) <= MAX_COUNT
    ]
    if problems:
        raise RequestRefused(422, *problems)
    return report


def _verdict_on(report: Report) -> AttemptOutcome:
    if report.cancelled:
        return AttemptOutcome.CANCELLED
    if report.status == 503:
        return AttemptOutcome.BUSY
    if not 100 <= report.status < 500:
        return AttemptOutcome.FAILURE
    return AttemptOutcome.CLIENT_ERROR if report.status >= 400 else AttemptOutcome.SUCCESS


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as broken:
        raise RequestRefused(400, Problem("(body)", str(broken), _form(kind))) from None


def _form(kind: type[Any]) -> str:
    return f"an object with some of: {', '.join(field.name for field in msgspec.structs.fields(kind))}"


class PickRoutes:
    """`/pick`, and what becomes of the places it reserved."""

    def __init__(self, operated: AdminTarget, *, limit: int = MAX_RESERVATIONS) -> None:
        self._operated = operated
        self._placer = Placer(operated, lease_s=DEFAULT_LEASE_S, fallbacks=0, queue=QUEUE, limit=limit, observed=False)
        self._held: dict[str, CarriedRequest] = {}  # by their reservations

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
        carried = self._placer.begin("POST", question.path, [])
        placement = await _prepare(carried, question, body, inference, target)
        if question.reserve and self._placer.held.full:
            raise RequestRefused(
                429, Problem("reserve", "too many reservations are open", "settle them with /pick/ID/done")
            )
        now = operated.clock()
        decision = placement.decide(now)
        shown = {} if isinstance(decision, Refusal) else _shown(decision, target.cluster, carried.exchange)
        if question.reserve:
            carried.take(placement, decision, now)
        if isinstance(decision, Refusal):
            raise _refused(decision)
        if carried.held is None:
            return reply_json(shown)
        name = carried.held.id
        self._held[name] = carried
        carried.held.on_lapse = partial(self._lapse, name)
        shown["reservation"] = {"id": name, "lease_s": question.lease_s}
        return reply_json(shown, 201)

    def _lapse(self, name: str) -> None:
        self._held.pop(name).left()

    async def _first_token(self, request: Request) -> Response:
        await read_json_object(request, optional=True)
        carried = self._held.get(request.path_params["id"])
        if carried is None:
            raise _unknown()
        carried.first_byte(self._operated.clock())
        return reply_json({"first_token": True})

    async def _done(self, request: Request) -> Response:
        report = await _parse_report(request)
        carried = self._held.pop(request.path_params["id"], None)
        if carried is None:
            raise _unknown()
        verdict = _verdict_on(report)
        _end(carried, report, verdict, self._operated.clock())
        return reply_json({"endpoint": carried.exchange.outcome.endpoint, "outcome": verdict.value})


async def _prepare(
    carried: CarriedRequest, question: Question, body: bytes, inference: InferenceRequest, target: RouteTarget
) -> ExternalPlacement:
    """Return the placement of a request that may be carried. Raises RequestRefused."""
    exchange = carried.exchange
    exchange.policy = question.policy
    exchange.body = body
    exchange.inference = msgspec.structs.replace(inference, stream=question.first_token)
    carried.lease_s = question.lease_s
    try:
        placement = await carried.prepare(target, body)
    except LocalReply as why:
        raise RequestRefused(why.status, Problem("request", str(why))) from None
    exchange.body = exchange.names = None
    return placement


def _end(carried: CarriedRequest, report: Report, verdict: AttemptOutcome, now: float) -> None:
    outcome = carried.exchange.outcome
    outcome.status = report.status
    outcome.prompt_tokens = report.prompt_tokens
    outcome.cached_tokens = report.cached_tokens
    if verdict is AttemptOutcome.SUCCESS and outcome.ttft_s is None:
        outcome.ttft_s = now - carried.exchange.received_at
    carried.settle(verdict, cached_tokens=report.cached_tokens)
    carried.finish(now)


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


def _shown(decision: Decision[Endpoint], cluster: Cluster, exchange: Exchange) -> dict[str, object]:
    request = decision.request
    costs = decision.costs
    facts = request.facts
    endpoint = decision.endpoint
    return {
        "cluster": cluster.name,
        "endpoint": endpoint.id,
        "url": str(endpoint.origin),
        "headers": engine_headers(exchange, endpoint),
        "model": request.model,
        "policy": decision.policy,
        "reason": decision.reason,
        "prompt_tokens": facts.prompt_tokens or None,
        "matched_tokens": _matched(facts, endpoint),
        "candidates": [
            _candidate(each, facts, costs[index] if costs else None) for index, each in enumerate(decision.candidates)
        ],
        "reservation": None,
        **{key: value for one in installed(Feature) for key, value in one.describe_pick(decision, cluster).items()},
    }


def _matched(facts: OverlapFacts, endpoint: Endpoint) -> int | None:
    return facts.matched_tokens(endpoint.id) if facts.searched else None


def _candidate(endpoint: Endpoint, facts: OverlapFacts, cost: float | None) -> dict[str, object]:
    overlap = facts.by_endpoint.get(endpoint.id)
    return {
        "endpoint": endpoint.id,
        "url": str(endpoint.origin),
        "matched_tokens": _matched(facts, endpoint),
        "source": None if overlap is None else overlap.source,
        "cost": cost,
    }
