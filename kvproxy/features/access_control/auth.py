"""Filter `auth`: only clients with a known API key get through; and the keys: their source, and the owner of one."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.model import Name
from kvproxy.base.types import Clock, Headers
from kvproxy.features.access_control.metrics import AccessMetrics
from kvproxy.features.access_control.settings import ApiKey, AuthSettings
from kvproxy.proxy.filter_settings import RouterSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange

_AUTHORIZATION = b"authorization"
_API_KEY = b"x-api-key"  # Anthropic's clients
_REFUSED_HEADERS = [(b"www-authenticate", b'Bearer realm="kvproxy"')]

_name = TypeAdapter(Name)


class Owner(NamedTuple):
    """The tenant a key belongs to, and its further rights."""

    name: str
    debug: bool = False
    trusted: bool = False
    weight: float = 1.0


class KeyRing:
    """Finds the owner of a key in the same time for every key, known or not, however many there are.

    Keys are kept as digests under a secret of this process: no client can choose or predict a digest, so the duration
    of a lookup reveals nothing about any key."""

    def __init__(self, owners: Iterable[tuple[Owner, str]]) -> None:
        self._secret = secrets.token_bytes(32)
        digests = ((self._digest(key.encode()), owner) for owner, key in owners)
        self._by_digest = {digest: (digest, owner) for digest, owner in digests}
        self._nobody = (secrets.token_bytes(32), Owner(""))

    def owner(self, key: bytes) -> Owner | None:
        """Return the owner that goes with `key`; None when there is none."""
        digest = self._digest(key)
        known, owner = self._by_digest.get(digest, self._nobody)
        return owner if hmac.compare_digest(known, digest) else None

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def presented_key(headers: Headers) -> tuple[bytes, str]:
    """Return the key a client presents, from `authorization`, else from `x-api-key`; b"" and why when there is none."""
    bearer = [value for name, value in headers if name == _AUTHORIZATION]
    plain = [value for name, value in headers if name == _API_KEY]
    if len(bearer) > 1 or len(plain) > 1:
        return b"", "malformed"
    if bearer:
        scheme, _, key = bearer[0].partition(b" ")
        key = key.strip()
        return (key, "") if scheme.lower() == b"bearer" and key else (b"", "malformed")
    return (plain[0], "") if plain and plain[0] else (b"", "missing")


class AuthFilter(Step):
    """Filter that names the tenant of each request, or refuses it with 401.

    The client's key does not reach the engine unless `forward` is set. The answer is the same for every fault of a key;
    the metric distinguishes `missing`, `malformed` and `unknown`. `health_path` is the proxy's own: reading it takes no
    key."""

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
        super().__init__(app, metrics=metrics, clock=clock)
        self._keys = keys
        self._exempt_paths = exempt_paths
        self._forward = forward
        self._health_path = health_path
        self._isolate_tenants = isolate_tenants

    def before(self, exchange: Exchange, downstream: Downstream) -> None:
        """Set the request's tenant, or refuse the request."""
        if fault := self._admit(exchange, downstream.scope):
            self.metrics.group(AccessMetrics).auth_failures.labels(fault).inc()
            message = "A valid API key is required: `Authorization: Bearer <key>` or `x-api-key: <key>`."
            raise LocalReply(401, "invalid_api_key", message, headers=_REFUSED_HEADERS)

    async def answers(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Close a websocket without a known key."""
        if scope["type"] == "lifespan":
            return False
        fault = self._admit(Exchange.of(scope, now=self.clock()), scope)
        if fault:
            self.metrics.group(AccessMetrics).auth_failures.labels(fault).inc()
            await send({"type": "websocket.close", "code": 1008})
        return bool(fault)

    def _admit(self, exchange: Exchange, scope: Scope) -> str:
        """Return what is wrong with the key, a metric label; "" for nothing, and then the exchange is the tenant's."""
        exchange.may_debug = False
        exchange.isolated = self._isolate_tenants
        headers: Headers = scope["headers"]
        if not self._is_exempt(scope):
            key, fault = presented_key(headers)
            owner = self._keys.owner(key)
            if owner is None:
                return fault or "unknown"
            exchange.tenant, exchange.may_debug, exchange.trusted, exchange.weight = owner
        if not self._forward:
            scope["headers"] = [pair for pair in headers if pair[0] != _AUTHORIZATION and pair[0] != _API_KEY]
        return ""

    def _is_exempt(self, scope: Scope) -> bool:
        path = scope["path"]
        if path == self._health_path and scope.get("method") in ("GET", "HEAD"):
            return True
        return path in self._exempt_paths


def load_keys(given: Sequence[ApiKey], file: str) -> list[tuple[Owner, str]]:
    """Owner and key of every configured key; those from the file have no rights besides calling. Raises ConfigError
    with all problems; a key is never in the text."""
    problems: list[Problem] = []
    found = [
        (
            f"keys[{index}]",
            "",
            Owner(entry.name, entry.debug, entry.trusted, entry.weight),
            entry.key.get_secret_value(),
        )
        for index, entry in enumerate(given)
    ]
    if file:
        found += [(path, place, Owner(name), key) for path, place, name, key in _from_file(file, problems)]
    owners: dict[str, Owner] = {}
    for path, place, owner, key in found:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            problems.append(Problem(path, f"{place}the key is empty or not visible ASCII"))
        elif owners.setdefault(key, owner).name != owner.name:
            problems.append(Problem(path, f"{place}{owner.name!r} has the same key as {owners[key].name!r}"))
    if not found and not problems:
        problems.append(Problem("keys", "no key: no client could call", "give `keys` or `file`"))
    if problems:
        raise ConfigError(problems)
    return [(owner, key) for key, owner in owners.items()]


def _from_file(file: str, problems: list[Problem]) -> list[tuple[str, str, str, str]]:
    """(path, place, name, key) of each `name: key` line; blank lines and `#` comments are skipped."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problems.append(Problem("file", f"cannot read {file}: {why}"))
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        place = f"{file}, line {number}: "
        name, separator, key = text.partition(": ")
        try:
            if not separator:
                raise ValueError
            found.append(("file", place, _name.validate_python(name), key.strip()))
        except ValueError:
            problems.append(Problem("file", f"{place}expected `name: key` with a plain name"))
    return found


def build(app: ASGIApp, settings: AuthSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`. Raises ConfigError for keys it cannot use."""
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
