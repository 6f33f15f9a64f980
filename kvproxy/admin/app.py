"""The operator's listener: status, changes, metrics and the live page. Never reachable through the public one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from kvproxy.admin.access import Access
from kvproxy.admin.audit import Audit
from kvproxy.admin.cache import CacheRoutes
from kvproxy.admin.decisions import DecisionRoutes
from kvproxy.admin.endpoints import EndpointRoutes
from kvproxy.admin.health import HealthRoutes
from kvproxy.admin.history import History
from kvproxy.admin.live import LiveView
from kvproxy.admin.operated import AdminTarget
from kvproxy.admin.page import Page
from kvproxy.admin.pick import PickRoutes
from kvproxy.admin.replies import Refused, on_http_error, on_refused
from kvproxy.admin.routing import RoutingRoutes
from kvproxy.admin.settings import SettingsRoutes


def _set_root_level(level: str) -> None:
    logging.getLogger().setLevel(level)


def admin_app(
    operated: AdminTarget, history: History, *, set_level: Callable[[str], None] = _set_root_level
) -> ASGIApp:
    """The ASGI app, behind the configuration's token when there is one. `history` is entered by whoever made it."""
    audit = Audit()
    parts = (
        Page(),
        HealthRoutes(operated),
        LiveView(operated, history),
        EndpointRoutes(operated, audit),
        CacheRoutes(operated),
        RoutingRoutes(operated, audit),
        DecisionRoutes(operated),
        PickRoutes(operated),
        SettingsRoutes(operated, audit, set_level=set_level),
    )
    app = Starlette(
        routes=[route for part in parts for route in part.routes()],
        exception_handlers={Refused: on_refused, HTTPException: on_http_error},
    )
    app.router.redirect_slashes = False
    return Access(app, token=lambda: operated.config.admin.token)
