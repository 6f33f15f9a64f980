"""The operator's listener: status, changes, metrics and the live page. Never reachable through the public one.

Access takes a token where there is one, and never a foreign web page that acts through a browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import Callable, Sequence

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.base.errors import Problem
from kvproxy.base.installed import installed
from kvproxy.base.settings.addresses import is_loopback
from kvproxy.operate.admin.clusters import EndpointRoutes, RoutingRoutes
from kvproxy.operate.admin.live import LiveView, PageFiles, list_page_paths
from kvproxy.operate.admin.pick import PickRoutes
from kvproxy.operate.admin.process import AdviceRoutes, HealthRoutes, SettingsRoutes
from kvproxy.operate.admin.replies import Audit, RequestRefused, on_http_error, on_refused, reply_error
from kvproxy.operate.admin.views import CacheRoutes, DecisionRoutes
from kvproxy.operate.feature import Feature
from kvproxy.operate.mounted import may_be_below, without_root
from kvproxy.operate.runtime.history import History
from kvproxy.operate.runtime.operated import AdminTarget

#: Load balancers check health without a token; the page itself holds nothing but its own text.
_HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]*))(?::\d+)?")
#: The page needs its own files and its own API, and nothing else.
_SECURITY_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class AccessControl:
    """Middleware that refuses forbidden requests before all else, and sets security headers for browsers.

    Without a token the `Host` must be an address or `localhost`: a page that made its own name resolve here (DNS
    rebinding) is as foreign as any other. Changes must be JSON, which a browser's form cannot send, and must not come
    from another origin. `token` is called for every request, so that a reload may change it.

    Answers take milliseconds to assemble, so one such request is admitted per turn of the event loop, and clients'
    requests run between those of pages and scrapers. Health is never kept waiting."""

    def __init__(self, app: ASGIApp, *, token: Callable[[], SecretStr | None]) -> None:
        self.app = app
        self._token = token
        self._open_paths = _HEALTH_PATHS | list_page_paths()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if may_be_below(scope):
            scope = without_root(scope)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_SECURITY_HEADERS]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            if scope["method"] == "GET" and scope["path"] not in _HEALTH_PATHS:
                async with self._turn:
                    await asyncio.sleep(0)
            with contextlib.suppress(ClientDisconnect):  # it left during its upload: no answer can reach it
                await self.app(scope, receive, marked)
            return
        status, problem = refusal
        headers = {"www-authenticate": "Bearer"} if status == 401 else None
        await reply_error(status, [problem], headers=headers)(scope, receive, marked)

    def _refusal(self, scope: Scope) -> tuple[int, Problem] | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        token = self._token()
        if len([name for name, _ in scope["headers"] if name == b"authorization"]) > 1:
            headers[b"authorization"] = b""  # which of them counts would be a guess
        if scope["path"] not in self._open_paths:
            if token is None and not _local(headers.get(b"host", b"")):
                fix = "use 127.0.0.1 or localhost, or set admin.token"
                return 403, Problem("header host", "not an address of this listener", fix)
            if token is not None and not _authorized(headers.get(b"authorization", b""), token):
                return 401, Problem(
                    "header authorization", "admin token required", "send `Authorization: Bearer TOKEN`"
                )
        return _foreign(scope["method"], headers) if scope["method"] in _CHANGING else None


def _authorized(given: bytes, token: SecretStr) -> bool:
    return hmac.compare_digest(given, b"Bearer " + token.get_secret_value().encode())


def _local(host: bytes) -> bool:
    """Return True if the name in a Host header cannot belong to another host: loopback or any literal address."""
    match = _HOST.fullmatch(host.decode("latin-1"))
    if match is None:
        return False
    name = match[1] or match[2] or ""
    return is_loopback(name) or re.fullmatch(r"[0-9.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", name) is not None


def _foreign(method: str, headers: dict[bytes, bytes]) -> tuple[int, Problem] | None:
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    if kind != b"application/json" and not (empty and not kind):
        fix = "send `Content-Type: application/json`"
        return 415, Problem("header content-type", f"a {method} with a body must be JSON here", fix)
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
        return 403, Problem("header origin", "changes from another origin are refused", "use this listener's own page")
    return None


def set_root_level(level: str) -> None:
    """As Python's logging spells it."""
    logging.getLogger().setLevel(level)


def build_admin_app(
    operated: AdminTarget, history: History, *, set_level: Callable[[str], None] = set_root_level
) -> AccessControl:
    """Return the ASGI app, behind the configuration's token when there is one. `history` is entered by its maker."""
    audit = Audit()
    parts = (
        PageFiles(),
        HealthRoutes(operated),
        LiveView(operated, history),
        EndpointRoutes(operated, audit),
        CacheRoutes(operated),
        RoutingRoutes(operated),
        DecisionRoutes(operated),
        PickRoutes(operated),
        AdviceRoutes(operated, audit),
        SettingsRoutes(operated, audit, set_level=set_level),
    )
    routes = [route for part in parts for route in part.list_routes()]
    for feature in installed(Feature):
        routes += feature.list_admin_routes(operated, audit)
    return guard_routes(routes, token=lambda: operated.config.admin.token)


def guard_routes(routes: Sequence[Route], *, token: Callable[[], SecretStr | None]) -> AccessControl:
    """Return an app of these routes that answers errors as this listener does, behind access control."""
    app = Starlette(routes=routes, exception_handlers={RequestRefused: on_refused, HTTPException: on_http_error})
    app.router.redirect_slashes = False
    return AccessControl(app, token=token)
