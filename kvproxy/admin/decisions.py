"""The last decisions, for people: why a request went where it went, and how it ended."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.admin.operated import Operated
from kvproxy.admin.replies import limit_of, reply
from kvproxy.filters.recent import Decision

MAX_LIMIT = 1000


def last_decisions(operated: Operated, limit: int) -> list[dict[str, object]]:
    """At most `limit`, the newest first; no prompt text."""
    now, wall = operated.clock(), operated.wall_clock()

    def shown(decision: Decision) -> dict[str, object]:
        outcome = decision.outcome
        ended = wall - timedelta(seconds=now - decision.ended_at)
        return {
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
            "retries": max(0, outcome.attempts - 1),
            "prompt_tokens": outcome.prompt_tokens or decision.prompt_tokens or None,
            "matched_tokens": decision.matched_tokens,
            "cached_tokens": outcome.cached_tokens,
            "completion_tokens": outcome.completion_tokens,
            "ttft_s": outcome.ttft_s,
            "duration_s": decision.duration_s,
        }

    return [shown(decision) for decision in islice(operated.recent.latest(), limit)]


class DecisionRoutes:
    """`/decisions?limit=`."""

    def __init__(self, operated: Operated) -> None:
        self._operated = operated

    def routes(self) -> list[Route]:
        """Their paths."""
        return [Route("/decisions", self._decisions, methods=["GET"])]

    async def _decisions(self, request: Request) -> Response:
        limit = limit_of(request, default=100, most=MAX_LIMIT)
        return reply({"decisions": last_decisions(self._operated, limit)})
