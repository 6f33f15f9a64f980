"""The cache's side: sources and indexes, hot prefixes, leases, what breaks prefixes. Hashes only, never a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.admin.history import count_by_label
from kvproxy.admin.operated import AdminTarget, OperatorFinding
from kvproxy.admin.replies import RequestRefused, read_limit, reply
from kvproxy.errors import Problem
from kvproxy.kvcache.service import KvCache
from kvproxy.kvcache.status import cache_status, hot_prefixes, leases, prefix_breaks

MAX_LIMIT = 1000


class CacheRoutes:
    """Read-only."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/cache/status", self._status, methods=["GET"]),
            Route("/cache/hot", self._hot, methods=["GET"]),
            Route("/cache/leases", self._leases, methods=["GET"]),
            Route("/cache/breaks", self._breaks, methods=["GET"]),
        ]

    async def _status(self, request: Request) -> Response:
        metrics = self._operated.metrics
        predictions = {
            "predicted_tokens": count_by_label(metrics.kvcache.predicted_tokens, "source"),
            "reused_tokens": count_by_label(metrics.kvcache.reused_tokens, "source"),
            "results": count_by_label(metrics.kvcache.predictions, "result"),
            "alarms": [{"where": one.where, "what": one.what, "fix": one.fix} for one in self._alarms()],
        }
        return reply(
            {
                **cache_status(self._service()),
                "lookups": count_by_label(metrics.kvcache.lookups, "outcome"),
                "tokenizes": count_by_label(metrics.kvcache.tokenizes, "outcome"),
                "actions": count_by_label(metrics.holdings.actions, "result"),
                "predictions": predictions,
            }
        )

    async def _hot(self, request: Request) -> Response:
        limit = read_limit(request, default=20, most=MAX_LIMIT)
        return reply({"prefixes": await hot_prefixes(self._service(), limit)})

    async def _leases(self, request: Request) -> Response:
        return reply({"leases": leases(self._service(), self._operated.clock())})

    async def _breaks(self, request: Request) -> Response:
        return reply(prefix_breaks(self._service(), self._operated.clock()))

    def _alarms(self) -> Sequence[OperatorFinding]:
        return self._service().state.predictions.alarms()

    def _service(self) -> KvCache:
        kvcache = self._operated.kvcache
        if kvcache is None:
            fix = "put `kvcache` into `filters`, or leave `filters` out"
            raise RequestRefused(404, Problem("filters", "there is no kvcache filter, or it is off", fix))
        return kvcache
