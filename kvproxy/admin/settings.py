"""The effective configuration without its secrets, reading it anew, and the log level."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.admin.audit import Audit
from kvproxy.admin.operated import AdminTarget
from kvproxy.admin.replies import Refused, json_object, reply
from kvproxy.config.fields import spelling_hint
from kvproxy.config.schema import LogLevel
from kvproxy.errors import Problem

REDACTED = "**********"

#: Settings of other people's filters are plain data: whatever is called like a secret is taken for one.
_SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credential|authorization)s?$")

#: Values under such a name that are plainly counts or switches.
_HARMLESS = (int, float, bool, type(None))


def redacted(data: Any, *, name: str = "") -> Any:
    """Plain data without secrets, by the names they stand under."""
    if isinstance(data, dict):
        return {key: redacted(value, name=str(key)) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [redacted(value, name=name) for value in data]
    if _SECRET.search(name) and not isinstance(data, _HARMLESS) and data:
        return REDACTED
    return data


class SettingsRoutes:
    """`/config` and `/log`. `set_level` takes a level's name as Python's logging spells it."""

    def __init__(self, operated: AdminTarget, audit: Audit, *, set_level: Callable[[str], None]) -> None:
        self._operated = operated
        self._audit = audit
        self._set_level = set_level

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/config", self._config, methods=["GET"]),
            Route("/reload", self._reload, methods=["POST"]),
            Route("/log", self._log, methods=["GET", "PATCH"]),
        ]

    async def _config(self, request: Request) -> Response:
        return reply(redacted(self._operated.config.model_dump(mode="json")))

    async def _reload(self, request: Request) -> Response:
        """Read the configuration file anew and apply it; 422 with every problem when it cannot be."""
        reloader = self._operated.reloader
        if reloader is None:
            raise Refused(409, Problem("", "the proxy was not started from a file", "start it with -c FILE"))
        reloaded = await reloader()
        if reloaded.errors:
            self._audit.write(request, "reload", before="", after="refused")
            raise Refused(422, *reloaded.errors)
        told = {"after_restart": list(reloaded.after_restart), "lost": reloaded.lost}
        self._audit.write(request, "reload", before="", after="applied", **told)
        return reply({"reloaded": True, **told})

    async def _log(self, request: Request) -> Response:
        if request.method == "PATCH":
            self._change(request, await json_object(request))
        return reply({"level": _level()})

    def _change(self, request: Request, body: dict[str, Any]) -> None:
        problems = [Problem(key, "unknown key", spelling_hint(key, ["level"])) for key in body if key != "level"]
        level = body.get("level")
        if level not in list(LogLevel):
            problems.append(Problem("level", "not a log level", f"allowed: {', '.join(LogLevel)}"))
        if problems:
            raise Refused(422, *problems)
        before = _level()
        self._set_level(str(level).upper())
        self._audit.write(request, "log.level", before=before, after=level)


def _level() -> str:
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
