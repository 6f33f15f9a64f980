"""Settings of auth, cors and rate_limit."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model, Name, Secret


class CorsSettings(Model):
    """Settings of `cors` (Starlette's CORSMiddleware)."""

    allow_origins: tuple[str, ...] = ()
    """Origins that may call; `*` for any."""
    allow_origin_regex: str = ""
    """Or a regular expression for them."""
    allow_methods: tuple[str, ...] = ("GET", "POST", "DELETE")
    """Methods."""
    allow_headers: tuple[str, ...] = ("*",)
    """Request headers; `*` for any."""
    allow_credentials: bool = False
    """Let browsers send cookies and authorization."""
    expose_headers: tuple[str, ...] = ("x-request-id", "x-kvproxy-endpoint", "retry-after")
    """Response headers a page may read."""
    max_age: Duration = 600.0
    """How long a preflight answer may be cached."""


class ApiKey(Model):
    """One client's key."""

    name: Name
    """Name of the client: shown in logs and used as the tenant. Never the key itself."""
    key: Secret
    """The bearer token, usually `${VARIABLE}`."""
    debug: bool = False
    """May use the router's `debug_header`, which reveals cached prefixes of other tenants."""
    trusted: bool = False
    """Belongs to another proxy or scheduler of yours: fields and headers by which engines talk to each other
    (`kv_transfer_params`, `bootstrap_*`, ranks) pass. From all other clients they are taken out."""
    weight: float = Field(default=1.0, ge=0.01, le=100)
    """Its share where requests of several clients wait in the router queue: one of 2 gets twice what one of 1 gets."""


class AuthSettings(Model):
    """Settings of `auth`: bearer API keys, compared in constant time."""

    keys: tuple[ApiKey, ...] = ()
    """Keys given here."""
    file: str = ""
    """A file of `name: key` lines, read at start."""
    forward: bool = False
    """Send the client's Authorization header on to endpoints that have no key of their own."""
    isolate_tenants: bool = False
    """Cached prefixes of one tenant never serve another: its name goes into every hash and into the `cache_salt` that
    the engine gets, together with the salt of the client's own. A prefix that tenants share (a system prompt) is then
    computed and held once for each."""
    exempt_paths: tuple[str, ...] = ()
    """Exact paths that need no key."""


class RateLimitSettings(Model):
    """Settings of `rate_limit`: token buckets per tenant (or per client address without `auth`)."""

    retired = {"max_keys": "10,000 clients have buckets, the longest unused goes first"}

    requests_per_minute: float = Field(default=0, ge=0)
    """0: no limit."""
    tokens_per_minute: float = Field(default=0, ge=0)
    """Prompt and completion tokens by the engine's own count, charged afterwards; 0: no limit."""
    burst: float = Field(default=1.0, gt=0)
    """Size of a bucket in minutes' worth of its rate."""
