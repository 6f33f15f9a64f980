"""Warming by the operator: a prompt is computed at the endpoints that should hold it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import InferenceRequest
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.service import KvCache
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.routes import RouteTarget
from kvproxy.features.warming.settings import PrefixExport, WarmingPlace
from kvproxy.features.warming.warming import Warmed, Warmer
from kvproxy.operate.admin.pick import parse_question
from kvproxy.operate.admin.replies import Audit, RequestRefused, read_number, reply_json
from kvproxy.operate.runtime.operated import AdminTarget

#: Paths whose answers report reuse, and end after one token.
_PATHS = ("/v1/chat/completions", "/v1/completions")
MAX_REPLICAS = 64
MAX_EXPORTED = 200
#: Longer prefixes are not exported.
MAX_TOKENS = 32_768
#: Prefixes examined for an export, the last used ones.
LOOKED_AT = 1024
#: Fields that would make more of it than one prefill.
_LEFT_OUT = ("stream_options", "max_completion_tokens", "n", "best_of")


class WarmRoutes:
    """`POST /warm?limit=N`: the request, of the shape of `/pick`, is sent to N endpoints. `GET`: the hot prefixes."""

    def __init__(self, operated: AdminTarget, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit
        self._turn = asyncio.Lock()

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [Route("/warm", self._warm, methods=["POST"]), Route("/warm", self._export, methods=["GET"])]

    async def _export(self, request: Request) -> Response:
        service = self._operated.kvcache
        how = PrefixExport.OFF if service is None else part_of(service.settings, WarmingPlace).warming.export
        if service is None or how is PrefixExport.OFF:
            hint = "kvcache: {warming: {export: tokens}} does"
            raise RequestRefused(409, Problem("warming.export", "hot prefixes are not exported", hint))
        hot = find_hot(service, self._operated.clock())[: read_number(request, default=100, most=MAX_EXPORTED)]
        self._audit.write_line(request, "warm.export", prefixes=len(hot), told=how.value)
        lines = await asyncio.to_thread(_as_lines, hot, how)
        return Response(lines, media_type="application/x-ndjson")

    async def _warm(self, request: Request) -> Response:
        operated = self._operated
        service = operated.kvcache
        if service is None:
            raise RequestRefused(409, Problem("filters", "warming is the kvcache filter's", "add kvcache to the chain"))
        replicas = read_number(request, default=1, most=MAX_REPLICAS)
        question, body, inference = await parse_question(request, most_bytes=operated.config.limits.body)
        if question.path not in _PATHS:
            raise RequestRefused(422, Problem("path", "cannot be warmed", f"known: {', '.join(_PATHS)}"))
        target = operated.routes.resolve(question.path, inference.model)
        if target is None:
            raise RequestRefused(404, Problem("request.model", "no route leads there", "GET /endpoints shows them"))
        facts = service.gather(inference, body, cluster=target.cluster, model=target.upstream_model)
        chosen = choose_endpoints(facts, replicas, operated.clock())
        if not chosen:
            raise RequestRefused(503, Problem("endpoint", "none serves this model now", "GET /endpoints shows why"))
        prefill = await asyncio.to_thread(_as_prefill, body, facts.model)
        warmer = Warmer(engines=service.engines, metrics=operated.metrics, clock=operated.clock)
        async with self._turn:
            done = await asyncio.gather(
                *(_warm_one(warmer, service, target, inference, body, prefill, one, question.path) for one in chosen)
            )
        for endpoint, warmed in zip(chosen, done, strict=True):
            said = {"endpoint": endpoint.id, "result": warmed.result, "tokens": warmed.prompt_tokens}
            self._audit.write_line(request, "warm", **said)
        return reply_json({"endpoints": [_shown(one, each) for one, each in zip(chosen, done, strict=True)]})


def find_hot(service: KvCache, now: float) -> list[tuple[int, KnownPrefix]]:
    """Return the prefixes that several sessions use, by their total saving in tokens."""
    hotness = service.actions.hotness
    counted = (
        (hotness.count_recent_uses(one, now), one)
        for one in hotness.walk_latest(LOOKED_AT)
        if one.actionable and not one.session and len(one.tokens) <= MAX_TOKENS
    )
    threshold = service.settings.cache_strategy.hot_content_threshold
    hot = [(uses, one) for uses, one in counted if uses >= threshold]
    return sorted(hot, key=lambda pair: -pair[0] * len(pair[1].tokens))


def choose_endpoints(facts: RequestFacts, replicas: int, now: float) -> Sequence[Endpoint]:
    """Choose the endpoints that hold most of it already, then the least busy ones."""
    able = [one for one in facts.endpoints if one.condition(now) is Condition.UP]
    held = facts.overlaps.matched_tokens
    return sorted(able, key=lambda one: (-held(one.id), one.load.in_flight))[:replicas]


async def _warm_one(
    warmer: Warmer,
    service: KvCache,
    target: RouteTarget,
    inference: InferenceRequest,
    body: bytes,
    prefill: bytes,
    endpoint: Endpoint,
    path: str,
) -> Warmed:
    """Warm one endpoint; its index then includes the prompt, as for any request."""
    warmed = await warmer.warm_body(endpoint, path, prefill)
    if warmed.result in ("done", "unverified"):
        facts = service.gather(inference, body, cluster=target.cluster, model=target.upstream_model)
        service.placed(facts, endpoint.id)
        service.finished(facts, Result(endpoint.id, prefilled=True, prompt_tokens=warmed.prompt_tokens))
    return warmed


def _as_lines(hot: Sequence[tuple[int, KnownPrefix]], how: PrefixExport) -> bytes:
    """By tokens, each is a request as `kvproxy warm` reads it."""
    encode = msgspec.json.encode
    lines = []
    for uses, one in hot:
        if how is PrefixExport.HASHES:
            lines.append(encode({"prefix": one.name, "model": one.model, "tokens": len(one.tokens), "uses": uses}))
        else:
            salt = {"cache_salt": one.cache_salt} if one.cache_salt else {}
            lines.append(encode({"model": one.model, "prompt": list(one.tokens), "max_tokens": 1, **salt}))
    return b"".join(line + b"\n" for line in lines)


def _as_prefill(body: bytes, model: str) -> bytes:
    """Return the same prompt, for one token and in one piece, as the engines call its model."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    kept = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    return msgspec.json.encode({**kept, **({"model": model} if model else {}), "max_tokens": 1, "stream": False})


def _shown(endpoint: Endpoint, warmed: Warmed) -> dict[str, object]:
    return {
        "endpoint": endpoint.id,
        "result": warmed.result,
        "prompt_tokens": warmed.prompt_tokens,
        "cached_tokens": warmed.cached_tokens,
    }
