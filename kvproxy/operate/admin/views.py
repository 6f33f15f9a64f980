"""Common views: the last decisions (why a request went where it went, and how it ended), and the cache's side.
Hashes only, never a prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from operator import itemgetter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.cache.metrics import KvCacheMetrics
from kvproxy.cache.service import KvCache
from kvproxy.operate.admin.cache_status import cache_status, hot_prefixes
from kvproxy.operate.admin.replies import RequestRefused, read_number, reply_json
from kvproxy.operate.receipts.explain import explain_notes
from kvproxy.operate.receipts.receipt import receipt_type
from kvproxy.operate.runtime.operated import AdminTarget, OperatorFinding
from kvproxy.operate.runtime.recent import RecentRequest
from kvproxy.proxy.request.exchange import RESULTS

MAX_LIMIT = 1000
_NUMBER = re.compile(r"[0-9]{1,18}")


def list_decisions(
    operated: AdminTarget, limit: int, *, result: str = "", request_id: str = ""
) -> list[dict[str, object]]:
    """At most `limit`, the newest first, with `result` only those of which that became, with `request_id` only those of
    this request; no prompt text."""
    decisions = operated.recent.latest()
    wanted = (
        one
        for one in decisions
        if (not result or one.result == result) and (not request_id or one.request_id == request_id)
    )
    return [_shown(operated, decision) for decision in islice(wanted, limit)]


def _shown(operated: AdminTarget, decision: RecentRequest) -> dict[str, object]:
    now = operated.clock()
    outcome = decision.outcome
    ended = operated.wall_clock() - timedelta(seconds=now - decision.ended_at)
    return {
        "number": decision.number,
        "ended_at": ended.isoformat(timespec="milliseconds"),
        "ago_s": round(now - decision.ended_at, 3),
        "request_id": decision.request_id,
        "tenant": decision.tenant,
        "model": decision.model,
        "cluster": outcome.cluster,
        "endpoint": outcome.endpoint,
        "policy": outcome.policy,
        "reason": outcome.pick_reason,
        "status": outcome.status,
        "end": outcome.end,
        "result": decision.result,
        "local_reason": outcome.local_reason,
        "streamed": decision.streamed,
        "retries": max(0, outcome.attempts - 1),
        "prompt_tokens": outcome.prompt_tokens or decision.prompt_tokens or None,
        "matched_tokens": decision.matched_tokens if decision.facts.searched else None,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
        "ttft_s": outcome.ttft_s,
        "duration_s": decision.duration_s,
    }


def _candidates(decision: RecentRequest) -> list[dict[str, object]]:
    """Return the candidates of the last pick, the cheapest first, with their costs and estimated overlaps."""
    outcome = decision.outcome
    facts = decision.facts
    rows: list[tuple[float, dict[str, object]]] = []
    for index, endpoint in enumerate(outcome.candidates):
        cost = outcome.costs[index] if outcome.costs else None
        held = facts.by_endpoint.get(endpoint.id)
        row: dict[str, object] = {
            "endpoint": endpoint.id,
            "cost": cost,
            "matched_tokens": facts.matched_tokens(endpoint.id) if facts.searched else None,
            "lower": {} if held is None else dict(held.lower),
            "source": None if held is None else held.source,
            "age_s": None if held is None else held.age_s,
        }
        rows.append((math.inf if cost is None else cost, row))
    return [row for _, row in sorted(rows, key=itemgetter(0))]


def _notes(decision: RecentRequest) -> list[str]:
    """Return what features have to add, as `kvproxy explain` has it of a receipt."""
    notes: dict[str, Any] = decision.outcome.notes
    return explain_notes(receipt_type()("", decision.request_id, decision.outcome.end, decision.duration_s, **notes))


class DecisionRoutes:
    """`/decisions?limit=&result=&request_id=`, and `/decisions/NUMBER`: one with its candidates."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/decisions", self._decisions, methods=["GET"]),
            Route("/decisions/{number}", self._decision, methods=["GET"]),
        ]

    async def _decisions(self, request: Request) -> Response:
        limit = read_number(request, default=100, most=MAX_LIMIT)
        result = request.query_params.get("result", "")
        if result and result not in RESULTS:
            raise RequestRefused(400, Problem("result", "there is no such result", f"allowed: {', '.join(RESULTS)}"))
        wanted = request.query_params.get("request_id", "")
        return reply_json({"decisions": list_decisions(self._operated, limit, result=result, request_id=wanted)})

    async def _decision(self, request: Request) -> Response:
        number: str = request.path_params["number"]
        decision = self._operated.recent.numbered(int(number)) if _NUMBER.fullmatch(number) else None
        if decision is None:
            fix = f"the last {MAX_LIMIT} are kept; receipts keep more (docs/operations.md)"
            raise RequestRefused(404, Problem("number", "this decision is not kept any more", fix))
        shown = {**_shown(self._operated, decision), "candidates": _candidates(decision), "notes": _notes(decision)}
        return reply_json(shown)


class CacheRoutes:
    """Routes for cached, hot and pinned prefixes."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/cache/status", self._status, methods=["GET"]),
            Route("/cache/hot", self._hot, methods=["GET"]),
            Route("/cache/leases", self._leases, methods=["GET"]),
        ]

    async def _status(self, request: Request) -> Response:
        metrics = self._operated.metrics
        predictions = {
            "predicted_tokens": metrics.group(KvCacheMetrics).predicted_tokens.sum_by("source"),
            "reused_tokens": metrics.group(KvCacheMetrics).reused_tokens.sum_by("source"),
            "results": metrics.group(KvCacheMetrics).predictions.sum_by("result"),
            "alarms": [{"where": one.where, "what": one.what, "fix": one.fix} for one in self._alarms()],
        }
        return reply_json(
            {
                **await cache_status(self._service()),
                "tokenizes": metrics.group(KvCacheMetrics).tokenizes.sum_by("outcome"),
                **self._service().observers.describe("status", self._operated.clock()),
                "predictions": predictions,
            }
        )

    async def _hot(self, request: Request) -> Response:
        limit = read_number(request, default=20, most=MAX_LIMIT)
        return reply_json({"prefixes": await hot_prefixes(self._service(), limit)})

    async def _leases(self, request: Request) -> Response:
        service = self._service()
        now = self._operated.clock()
        described = service.observers.describe("pins", now)
        return reply_json({"leases": [], **described})

    def _alarms(self) -> Sequence[OperatorFinding]:
        return self._service().state.predictions.raised_alarms()

    def _service(self) -> KvCache:
        return require_cache(self._operated)


def require_cache(operated: AdminTarget) -> KvCache:
    """Return the cache service, which a request asks about. Raises RequestRefused where there is none."""
    if operated.kvcache is None:
        fix = "put `kvcache` into `filters`, or leave `filters` out"
        raise RequestRefused(404, Problem("filters", "there is no kvcache filter, or it is off", fix))
    return operated.kvcache
