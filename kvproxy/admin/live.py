"""Everything the live page and `kvproxy status` show, in one answer. Put together only while somebody looks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy import __version__
from kvproxy.admin.decisions import last_decisions
from kvproxy.admin.endpoints import endpoint_status
from kvproxy.admin.health import readiness
from kvproxy.admin.history import History
from kvproxy.admin.operated import FindingLike, Operated
from kvproxy.admin.routing import routing_status
from kvproxy.admin.speeds import unlearned
from kvproxy.filters.recent import Tally
from kvproxy.kvcache.hot_prefixes import hot_prefixes
from kvproxy.kvcache.status import leases, running_jobs

DECISIONS = 15
HOT = 8
#: Viewers within this time share one answer, and the search for hot prefixes is repeated no more often than that.
SHARED_S, HOT_AGAIN_S = 0.5, 5.0
#: Requests that ended so were not answered as their client wished, and not by its own doing.
FAILED_ENDS = frozenset({"engine_error", "upstream_died", "local_reply", ""})


class LiveView:
    """`/live`: a snapshot, and the last minutes as series."""

    def __init__(self, operated: Operated, history: History) -> None:
        self._operated = operated
        self._history = history
        self._started_at = operated.clock()
        self._body = b""
        self._body_at = -SHARED_S
        self._hot: list[dict[str, object]] = []
        self._hot_at = -HOT_AGAIN_S

    def routes(self) -> list[Route]:
        """Its path."""
        return [Route("/live", self._live, methods=["GET"])]

    async def _live(self, request: Request) -> Response:
        now = self._operated.clock()
        if now - self._body_at >= SHARED_S or not self._body:
            await self._refresh_hot(now)
            self._body = msgspec.json.encode(self.snapshot(now))
            self._body_at = now
        return Response(self._body, media_type="application/json", headers={"cache-control": "no-store"})

    def snapshot(self, now: float) -> dict[str, object]:
        """All of it but for hot prefixes, which are as of the last look."""
        operated = self._operated
        ready, why = readiness(operated)
        minute = self._history.last_minute(now)
        return {
            "version": __version__,
            "time": operated.wall_clock().isoformat(timespec="seconds"),
            "uptime_s": now - self._started_at,
            "ready": ready,
            "readiness": why,
            "endpoints": self._endpoints(minute),
            "last_minute": _summary(minute),
            "history": self._series(now),
            "routing": {name: routing_status(one, now) for name, one in operated.clusters.items()},
            "cache": self._cache(now),
            "decisions": last_decisions(operated, DECISIONS),
            "findings": [
                {"severity": str(one.severity), "where": one.where, "what": one.what, "fix": one.fix}
                for one in (*operated.findings, *self._alarms(), *unlearned(operated.clusters))
            ],
        }

    def _endpoints(self, minute: Tally) -> list[dict[str, object]]:
        operated = self._operated
        routed: dict[tuple[str, str], int] = {}
        for (cluster, endpoint, _), count in minute.items():
            routed[cluster, str(endpoint)] = routed.get((cluster, str(endpoint)), 0) + count
        return [
            {
                "cluster": name,
                **endpoint_status(operated, name, endpoint),
                "requests_last_minute": routed.get((name, str(endpoint.id)), 0),
            }
            for name, cluster in operated.clusters.items()
            for endpoint in cluster.endpoints
        ]

    def _series(self, now: float) -> dict[str, Sequence[float | None]]:
        """One value a sample, the oldest first; `ago_s` says when."""
        samples = self._history.samples
        return {
            "ago_s": [round(now - one.at, 2) for one in samples],
            "requests": [sum(one.tally.values()) for one in samples],
            "failed": [_failed(one.tally) for one in samples],
            "ttft_p50_s": [one.ttft_p50_s for one in samples],
            "ttft_p95_s": [one.ttft_p95_s for one in samples],
            "prompt_tokens": [one.prompt_tokens for one in samples],
            "cached_tokens": [one.cached_tokens for one in samples],
            "predicted_tokens": [one.predicted_tokens for one in samples],
        }

    def _alarms(self) -> Sequence[FindingLike]:
        kvcache = self._operated.kvcache
        return () if kvcache is None else kvcache.parts.learning.scores.alarms()

    def _cache(self, now: float) -> dict[str, object] | None:
        kvcache = self._operated.kvcache
        if kvcache is None:
            return None
        parts = kvcache.parts
        return {
            "running": running_jobs(parts),
            "waiting": parts.background.waiting,
            "leases": len(leases(parts, now)),
            "breakers": parts.guard.states(),
            "hot": self._hot,
        }

    async def _refresh_hot(self, now: float) -> None:
        kvcache = self._operated.kvcache
        if kvcache is not None and now - self._hot_at >= HOT_AGAIN_S:
            self._hot_at = now
            self._hot = await hot_prefixes(kvcache.parts, HOT)


def _summary(minute: Tally) -> dict[str, int]:
    return {"requests": sum(minute.values()), "failed": _failed(minute)}


def _failed(tally: Tally) -> int:
    return sum(count for (_, _, end), count in tally.items() if end in FAILED_ENDS)
