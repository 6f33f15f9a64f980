"""The process over the admin listener: health, metrics, the effective configuration, reload, log level and advice."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.errors import Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.routes import clusters_without_endpoint
from kvproxy.operate.admin.replies import Audit, RequestRefused, read_json_object, reply_json
from kvproxy.operate.config.decode import spelling_hint
from kvproxy.operate.metrics.page import render_exposition
from kvproxy.operate.runtime.operated import AdminTarget, OperatedProcess
from kvproxy.proxy.settings import LogLevel

REDACTED = "**********"
#: Seconds of simulations in one run of the adviser.
_BUDGET_S = 60.0
_MAX_BUDGET_S = 600.0
#: Settings of third-party filters are plain data: a key named like a secret is treated as one.
_SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credential|authorization)s?$")
#: Values under such a name that are counts or switches.
_HARMLESS = (int, float, bool, type(None))


def check_readiness(operated: AdminTarget) -> tuple[bool, str]:
    """Ready while not draining and while some endpoint of every cluster takes traffic; and why not."""
    if operated.draining:
        return False, "draining"
    without = clusters_without_endpoint(operated.clusters, operated.clock())
    return (False, f"no endpoint in {', '.join(without)}") if without else (True, "ready")


class HealthRoutes:
    """`/healthz`, `/readyz` and `/metrics`, as plain text."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        ready, text = check_readiness(self._operated)
        return PlainTextResponse(f"{text}\n", 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return await _expose(self._operated.metrics)


async def _expose(metrics: Metrics) -> Response:
    return Response(await render_exposition(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def make_metrics_app(metrics: Metrics) -> ASGIApp:
    """Return an app that answers every request with the metrics."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (await _expose(metrics))(scope, receive, send)

    return answer


def redact_secrets(data: Any, *, name: str = "") -> Any:
    """Plain data without secrets, by the names they stand under."""
    if isinstance(data, dict):
        return {key: redact_secrets(value, name=str(key)) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [redact_secrets(value, name=name) for value in data]
    if _SECRET.search(name) and not isinstance(data, _HARMLESS) and data:
        return REDACTED
    return data


class AdviceRoutes:
    """`/advise`: the latest advice of the adviser (docs/doctor.md), and the start of another run: a process of its
    own, one at a time."""

    def __init__(self, operated: OperatedProcess, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit

    def list_routes(self) -> list[Route]:
        """Its path."""
        return [Route("/advise", self._advise, methods=["GET", "POST"])]

    async def _advise(self, request: Request) -> Response:
        adviser = self._operated.adviser
        if request.method == "GET":
            nothing = {"state": "unavailable", "started": None, "error": "", "advice": None}
            return reply_json(nothing if adviser is None else adviser.describe_run())
        body = await read_json_object(request, optional=True)
        if adviser is None:
            raise RequestRefused(409, Problem("", "the proxy was not started from a file", "start it with -c FILE"))
        budget_s = body.pop("budget_s", _BUDGET_S)
        problems = [Problem(key, "unknown key", spelling_hint(key, ["budget_s"])) for key in body]
        if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 <= budget_s <= _MAX_BUDGET_S:
            problems.append(Problem("budget_s", "no number of seconds", f"from 0 to {_MAX_BUDGET_S:g}"))
        if problems:
            raise RequestRefused(422, *problems)
        if not adviser.start_run(math.ceil(budget_s)):
            raise RequestRefused(409, Problem("", "it runs already", "GET /advise shows when it is done"))
        self._audit.write_line(request, "advise", budget_s=budget_s)
        return reply_json(adviser.describe_run(), 202)


class SettingsRoutes:
    """`/config` and `/log`. `set_level` takes a level's name as Python's logging spells it."""

    def __init__(self, operated: OperatedProcess, audit: Audit, *, set_level: Callable[[str], None]) -> None:
        self._operated = operated
        self._audit = audit
        self._set_level = set_level

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/config", self._config, methods=["GET"]),
            Route("/reload", self._reload, methods=["POST"]),
            Route("/log", self._log, methods=["GET", "PATCH"]),
        ]

    async def _config(self, request: Request) -> Response:
        return reply_json(redact_secrets(self._operated.config.model_dump(mode="json")))

    async def _reload(self, request: Request) -> Response:
        """Read the configuration file again and apply it; 422 with every problem when it cannot be."""
        reloader = self._operated.reloader
        if reloader is None:
            raise RequestRefused(409, Problem("", "the proxy was not started from a file", "start it with -c FILE"))
        reloaded = await reloader()
        if reloaded.errors:
            self._audit.write_line(request, "reload", before="", after="refused")
            raise RequestRefused(422, *reloaded.errors)
        after_restart = list(reloaded.after_restart)
        self._audit.write_line(request, "reload", before="", after="applied", after_restart=after_restart)
        return reply_json({"reloaded": True, "after_restart": after_restart})

    async def _log(self, request: Request) -> Response:
        if request.method == "PATCH":
            self._change(request, await read_json_object(request))
        return reply_json({"level": _level()})

    def _change(self, request: Request, body: dict[str, Any]) -> None:
        problems = [Problem(key, "unknown key", spelling_hint(key, ["level"])) for key in body if key != "level"]
        level = body.get("level")
        if level not in list(LogLevel):
            problems.append(Problem("level", "not a log level", f"allowed: {', '.join(LogLevel)}"))
        if problems:
            raise RequestRefused(422, *problems)
        before = _level()
        self._set_level(str(level).upper())
        self._audit.write_line(request, "log.level", before=before, after=level)


def _level() -> str:
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
