"""`/advise`: the latest advice of the adviser, and the start of another run of it (docs/advise.md)."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.admin.operated import AdminTarget
from kvproxy.admin.replies import Audit, RequestRefused, read_json_object, reply
from kvproxy.config.fields import spelling_hint
from kvproxy.errors import Problem

_BUDGET_S, _MAX_BUDGET_S = 60.0, 600.0


class AdviceRoutes:
    """Nothing is computed here: a run is a process of its own, one at a time."""

    def __init__(self, operated: AdminTarget, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit

    def routes(self) -> list[Route]:
        """Its path."""
        return [Route("/advise", self._advise, methods=["GET", "POST"])]

    async def _advise(self, request: Request) -> Response:
        adviser = self._operated.adviser
        if request.method == "GET":
            nothing = {"state": "unavailable", "started": None, "error": "", "advice": None}
            return reply(nothing if adviser is None else adviser.describe())
        body = await read_json_object(request, optional=True)
        if adviser is None:
            raise RequestRefused(409, Problem("", "the proxy was not started from a file", "start it with -c FILE"))
        budget_s = body.pop("budget_s", _BUDGET_S)
        problems = [Problem(key, "unknown key", spelling_hint(key, ["budget_s"])) for key in body]
        if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 <= budget_s <= _MAX_BUDGET_S:
            problems.append(Problem("budget_s", "no number of seconds", f"from 0 to {_MAX_BUDGET_S:g}"))
        if problems:
            raise RequestRefused(422, *problems)
        if not adviser.start(math.ceil(budget_s)):
            raise RequestRefused(409, Problem("", "it runs already", "GET /advise tells when it is done"))
        self._audit.write_line(request, "advise", budget_s=budget_s)
        return reply(adviser.describe(), 202)
