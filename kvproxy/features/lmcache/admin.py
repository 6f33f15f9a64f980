"""Priorities that an operator gives prefixes: `/cache/priorities` of the admin listener. Hashes only, never a
prompt."""

from __future__ import annotations

import re
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.cache.prefix.eviction import Priority
from kvproxy.cache.service import KvCache
from kvproxy.features.lmcache.cold_prefixes import MAX_PRIORITIES, ColdPrefixes, PrefixPriorities
from kvproxy.features.lmcache.settings import strategy_of
from kvproxy.operate.admin.replies import Audit, RequestRefused, read_json_object, read_number, reply_json
from kvproxy.operate.admin.views import MAX_LIMIT, require_cache
from kvproxy.operate.runtime.operated import AdminTarget

_PREFIX = re.compile(r"[0-9a-f]{16}")
_PRIORITIES = {one.name.lower(): one for one in Priority}


class PriorityRoutes:
    """`GET /cache/priorities?limit=` and `PUT /cache/priorities/PREFIX`."""

    def __init__(self, operated: AdminTarget, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/cache/priorities", self._priorities, methods=["GET"]),
            Route("/cache/priorities/{prefix}", self._set_priority, methods=["PUT"]),
        ]

    async def _priorities(self, request: Request) -> Response:
        limit = read_number(request, default=20, most=MAX_LIMIT)
        service = require_cache(self._operated)
        return reply_json({"prefixes": describe_prefixes(service, limit, self._operated.clock())})

    async def _set_priority(self, request: Request) -> Response:
        """One prefix, by the name that the audit log gives it."""
        priorities = require_cache(self._operated).state.of(PrefixPriorities)
        name = request.path_params["prefix"]
        if not _PREFIX.fullmatch(name):
            raise RequestRefused(
                404, Problem("prefix", "not the name of a prefix", "16 hex digits, as in the audit log")
            )
        body = await read_json_object(request)
        wanted = body.get("priority")
        if list(body) != ["priority"] or not isinstance(wanted, str) or wanted not in _PRIORITIES:
            raise RequestRefused(422, Problem("priority", "not a priority", f"one of {', '.join(_PRIORITIES)}"))
        if not priorities.set_priority(int(name, 16), _PRIORITIES[wanted]):
            fix = "set others to normal; `GET /cache/priorities` lists them"
            raise RequestRefused(409, Problem("prefix", f"more than {MAX_PRIORITIES} prefixes have a priority", fix))
        self._audit.write_line(request, "cache.priority", prefix=name, priority=wanted)
        return reply_json({"prefix": name, "set": wanted})


def describe_prefixes(service: KvCache, limit: int, now: float) -> list[dict[str, object]]:
    """For people: those with a priority of their own, then the last used ones. Hashes, never prompts."""
    hotness = service.actions.hotness
    priorities = service.state.of(PrefixPriorities).by_key
    cold = ColdPrefixes(strategy_of(service.settings), hotness, priorities)
    found = {key: hotness.find_prefix(key) for key in priorities}
    found |= {one.key: one for one in hotness.walk_latest(limit)}
    return [
        {
            "prefix": f"{key:016x}",
            "set": priorities.get(key, Priority.NORMAL).name.lower(),
            "priority": None if one is None else cold.priority(one, now).name.lower(),
            "score": None if one is None else round(cold.score(one, now), 3),
            "tokens": None if one is None else len(one.tokens),
            "uses": None if one is None else hotness.count_recent_uses(one, now),
        }
        for key, one in islice(found.items(), limit)
    ]
