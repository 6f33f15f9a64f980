"""Settings of the filters shipped here, each decoded by its own model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.config.model import Fraction, Model, Name
from kvproxy.config.values import Duration, Secret


class AccessLogSettings(Model):
    """Settings of `access_log`."""

    sample: Fraction = 1.0
    """Share of the requests logged; those that failed (5xx, or broken off) always are."""
    format: Literal["text", "json"] | None = None
    """One readable line, or one JSON object; unset: as `log.format` says."""


class RequestIdSettings(Model):
    """Settings of `request_id`."""

    header: str = "x-request-id"
    """Header read from the client, sent upstream and answered."""
    trust_client: bool = True
    """Take the client's id if it is sane (up to 128 visible ASCII characters)."""


class CorsSettings(Model):
    """Settings of `cors` (Starlette's CORSMiddleware)."""

    allow_origins: tuple[str, ...] = ()
    """Origins that may call; `*` for any."""
    allow_origin_regex: str = ""
    """Or a regular expression for them."""
    allow_methods: tuple[str, ...] = ("GET", "POST")
    """Methods."""
    allow_headers: tuple[str, ...] = ("authorization", "content-type")
    """Request headers."""
    allow_credentials: bool = False
    """Let browsers send cookies and authorization."""
    expose_headers: tuple[str, ...] = ("x-request-id", "x-kvproxy-endpoint")
    """Response headers a page may read."""
    max_age: Duration = 600.0
    """How long a preflight answer may be cached."""


class ApiKey(Model):
    """One client's key."""

    name: Name
    """Who it is; shown in logs and used as the tenant. Never the key itself."""
    key: Secret
    """The bearer token, usually `${VARIABLE}`."""


class AuthSettings(Model):
    """Settings of `auth`: bearer API keys, compared in constant time."""

    keys: tuple[ApiKey, ...] = ()
    """Keys given here."""
    file: str = ""
    """A file of `name: key` lines, read at start."""
    forward: bool = False
    """Send the client's Authorization header on to endpoints that have no key of their own."""
    exempt_paths: tuple[str, ...] = ()
    """Exact paths that need no key."""


class RateLimitSettings(Model):
    """Settings of `rate_limit`: token buckets per tenant (or per client address without `auth`)."""

    requests_per_minute: float = Field(default=0, ge=0)
    """0: no limit."""
    tokens_per_minute: float = Field(default=0, ge=0)
    """Prompt and completion tokens by the engine's own count, charged afterwards; 0: no limit."""
    burst: float = Field(default=1.0, gt=0)
    """Size of a bucket in minutes' worth of its rate."""
    max_keys: int = Field(default=10_000, ge=1)
    """Buckets kept; the longest unused goes first."""


class InferenceRequestSettings(Model):
    """Settings of `inference_request`."""

    session_header: str = "x-session-id"
    """Header that names the session; then `session_id` and `user` in the body."""


class RouterSettings(Model):
    """Settings of `router`."""

    debug_header: str = "x-kvproxy-debug"
    """A request that carries it gets `x-kvproxy-decision`; empty: nobody does."""
    policy_header: str = Field(default="x-kvproxy-policy", min_length=1)
    """Names the balancing policy for one request, in clusters with `client_policies`. Never sent to an engine."""


class TracingSettings(Model):
    """Settings of `tracing` (OpenTelemetry; the standard `OTEL_` variables say where spans go)."""

    service_name: Name = "kvproxy"
    """`service.name` of the spans, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` says otherwise."""
    provider_name: Name = "vllm"
    """`gen_ai.provider.name` of the attempts: what the engines are."""


#: Settings type of every filter shipped here; other people's filters bring their own (entry point `kvproxy.filters`).
FILTER_SETTINGS: dict[str, type[Model]] = {
    "access_log": AccessLogSettings,
    "auth": AuthSettings,
    "cors": CorsSettings,
    "inference_request": InferenceRequestSettings,
    "kvcache": KvCacheSettings,
    "rate_limit": RateLimitSettings,
    "request_id": RequestIdSettings,
    "router": RouterSettings,
    "tracing": TracingSettings,
}

DEFAULT_FILTERS: tuple[str, ...] = ("request_id", "access_log", "inference_request", "kvcache", "router")
