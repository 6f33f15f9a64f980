"""Filter `auth`: only clients with a known API key get through."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.config.filter_schema import AuthSettings, RouterSettings
from kvproxy.filters.api_keys import KeyRing, load_keys
from kvproxy.filters.chain import FilterContext
from kvproxy.metrics.catalog import Metrics
from kvproxy.request.error_reply import local_reply
from kvproxy.request.exchange import Exchange
from kvproxy.types import Clock, Headers

_AUTHORIZATION = b"authorization"
_API_KEY = b"x-api-key"  # Anthropic's clients
_REFUSED_HEADERS = [(b"www-authenticate", b'Bearer realm="kvproxy"')]


def presented_key(headers: Headers) -> tuple[bytes, str]:
    """The key a client presents, from `authorization`, else from `x-api-key`; b"" and why when there is none."""
    bearer = [value for name, value in headers if name == _AUTHORIZATION]
    plain = [value for name, value in headers if name == _API_KEY]
    if len(bearer) > 1 or len(plain) > 1:
        return b"", "malformed"
    if bearer:
        scheme, _, key = bearer[0].partition(b" ")
        key = key.strip()
        return (key, "") if scheme.lower() == b"bearer" and key else (b"", "malformed")
    return (plain[0], "") if plain and plain[0] else (b"", "missing")


class AuthFilter:
    """Names the tenant of each request, or refuses it with 401.

    What the client presented does not go on to the engine unless `forward` is set. The answer is the same whatever
    was wrong with the key; the metric tells `missing`, `malformed` and `unknown` apart. `health_path` is the proxy's
    own: reading it takes no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        exempt_paths: frozenset[str],
        forward: bool,
        metrics: Metrics,
        clock: Clock,
        health_path: str = "",
        isolate_tenants: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._exempt_paths = exempt_paths
        self._forward = forward
        self._metrics = metrics
        self._clock = clock
        self._health_path = health_path
        self._isolate_tenants = isolate_tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope, now=self._clock())
        exchange.may_debug = False
        exchange.isolated = self._isolate_tenants
        headers: Headers = scope["headers"]
        if not self._is_exempt(scope):
            key, fault = presented_key(headers)
            owner = self._keys.owner(key)
            if owner is None:
                await self._refuse(fault or "unknown", scope, send)
                return
            exchange.tenant, exchange.may_debug, exchange.trusted = owner
        if not self._forward:
            kept = [item for item in headers if item[0] != _AUTHORIZATION and item[0] != _API_KEY]
            scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)

    def _is_exempt(self, scope: Scope) -> bool:
        path = scope["path"]
        if path == self._health_path and scope.get("method") in ("GET", "HEAD"):
            return True
        return path in self._exempt_paths

    async def _refuse(self, fault: str, scope: Scope, send: Send) -> None:
        self._metrics.bounds.auth_failures.labels(fault).inc()
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await local_reply(
            scope,
            send,
            status=401,
            reason="invalid_api_key",
            message="A valid API key is required: `Authorization: Bearer <key>` or `x-api-key: <key>`.",
            metrics=self._metrics,
            headers=_REFUSED_HEADERS,
        )


def build(app: ASGIApp, settings: AuthSettings, context: FilterContext) -> ASGIApp:
    """The filter around `app`. Raises ConfigError for keys it cannot use."""
    router = next((spec.settings for spec in context.config.filters if spec.name == "router"), None)
    own = router if isinstance(router, RouterSettings) else RouterSettings()
    return AuthFilter(
        app,
        keys=KeyRing(load_keys(settings.keys, settings.file)),
        exempt_paths=frozenset(settings.exempt_paths),
        forward=settings.forward,
        metrics=context.metrics,
        clock=context.clock,
        health_path=own.health_path,
        isolate_tenants=settings.isolate_tenants,
    )
