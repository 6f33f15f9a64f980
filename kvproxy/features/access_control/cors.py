"""Filter `cors`: lets browsers of other origins call, through Starlette's middleware."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Send

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.features.access_control.settings import CorsSettings
from kvproxy.proxy.filters.chain import FilterContext

#: Methods of the APIs; pages of other origins may use no other.
_METHODS = ("GET", "POST", "DELETE")
#: Time for which a browser may keep the answer to a preflight request.
_MAX_AGE_S = 600


class CorsFilter(CORSMiddleware):
    """Starlette's, in front of engines that may set the same fields: `vary: Origin` is sent once."""

    async def send(self, message: Message, send: Send, request_headers: Headers) -> None:
        """Send the head without the engine's own `vary: Origin`."""
        if message["type"] == "http.response.start":
            fields = [(name, value) for name, value in message.get("headers", ()) if not _varies(name, value)]
            message = {**message, "headers": fields}
        await super().send(message, send, request_headers)


def _varies(name: bytes, value: bytes) -> bool:
    return name == b"vary" and value.strip().lower() == b"origin"


def build(app: ASGIApp, settings: CorsSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`. Raises ConfigError when no origin may call, or the expression is wrong."""
    if not settings.allow_origins and not settings.allow_origin_regex:
        raise ConfigError([Problem("allow_origins", "no origin is allowed", "name origins, or '*' for any")])
    try:
        re.compile(settings.allow_origin_regex)
    except re.error as error:
        raise ConfigError([Problem("allow_origin_regex", f"not a regular expression: {error}")]) from None
    return CorsFilter(
        app,
        allow_origins=settings.allow_origins,
        allow_origin_regex=settings.allow_origin_regex or None,
        allow_methods=_METHODS,
        allow_headers=("*",),
        allow_credentials=settings.allow_credentials,
        expose_headers=settings.expose_headers,
        max_age=_MAX_AGE_S,
    )
