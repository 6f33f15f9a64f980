"""Settings of the filters shipped here, each decoded by its own model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvproxy.base.installed import installed
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.model import Duration, Fraction, Model, Name, Secret
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.proxy.feature import ProxyFeature


class AccessLogSettings(Model):
    """Settings of `access_log`."""

    sample: Fraction = 1.0
    """Share of the requests logged; those that failed (5xx, or broken off) always are."""
    format: Literal["text", "json"] | None = None
    """One readable line, or one JSON object; unset: as `log.format`."""


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

    session_header: str = ""
    """Header that names the session, before those that agents send by themselves (docs/sessions.md)."""


def _listed_paths(value: Any) -> Any:
    if value == "all":
        return ("all",)
    if isinstance(value, str):
        raise ValueError("must be a list of paths, or `all`")
    return value


PathList = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed_paths),
    WithJsonSchema({"anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Paths, or the word `all`."""


class CachedTokens(StrEnum):
    """Count of cached tokens that clients get if the engine's usage lacks it in the format of their API."""

    OFF = "off"
    ENGINE = "engine"
    PREDICTED = "predicted"  # also kvproxy's prediction if the engine reports none


class RouterSettings(Model):
    """Settings of `router`."""

    debug_header: str = "x-kvproxy-debug"
    """A request that carries it gets `x-kvproxy-decision`; empty: no request does."""
    policy_header: str = Field(default="x-kvproxy-policy", min_length=1)
    """Names the balancing policy for one request, in clusters with `client_policies`. Never sent to an engine."""
    paths: PathList = ()
    """Paths clients may ask for besides inference, `/v1/models` and tokenizing; one that ends in `/` opens all below
    it. `all` opens every path of every engine, also those that load adapters, clear caches or stop it."""
    trust_clients: bool = False
    """Every client is trusted as one with a key marked `trusted` is: only for a listener that no user can reach, or in
    front of a server that is no engine."""
    health_path: str = "/health"
    """`GET` here is answered by the proxy for load balancers, without a key: 200 while every cluster has an endpoint
    that takes requests, else 503. Empty: none."""
    cached_tokens: CachedTokens = CachedTokens.OFF
    """Writes the count of cached tokens into an answer's usage where the client's API has a place for it and the engine
    left it empty: `engine`: if the engine reports it elsewhere in the answer; `predicted`: otherwise
    kvproxy's own prediction. Answers that are longer than 1 MiB and not streamed stay as they are."""


#: Settings types of the core's filters; third-party filters bring their own (entry point `kvproxy.filters`).
FILTER_SETTINGS: dict[str, type[Model]] = {
    "access_log": AccessLogSettings,
    "auth": AuthSettings,
    "cors": CorsSettings,
    "inference_request": InferenceRequestSettings,
    "kvcache": KvCacheSettings,
    "rate_limit": RateLimitSettings,
    "request_id": RequestIdSettings,
    "router": RouterSettings,
}

DEFAULT_FILTERS: tuple[str, ...] = ("request_id", "access_log", "inference_request", "kvcache", "router")


@cache
def filter_models() -> Mapping[str, type[Model]]:
    """Return the settings type of every filter by name, those of features included."""
    added = {name: kind for feature in installed(ProxyFeature) for name, kind in feature.filters.items()}
    return {name: composed(kind) for name, kind in {**added, **FILTER_SETTINGS}.items()}


#: Positions of filters in a chain that is not written out: the first names are outermost, the last ones next to the
#: engines. Third-party filters stand between the two, so that they see the parsed request and may refuse it.
OUTER_FILTERS: tuple[str, ...] = (
    "tracing",
    "request_id",
    "access_log",
    "cors",
    "auth",
    "rate_limit",
    "inference_request",
)
INNER_FILTERS: tuple[str, ...] = ("normalize", "kvcache", "router")


def order_filters(names: Iterable[str]) -> list[str]:
    """Return the default chain with `names` added, each at its place; other people's filters in the order given."""
    wanted = dict.fromkeys([*DEFAULT_FILTERS, *names])
    others = [name for name in wanted if name not in OUTER_FILTERS and name not in INNER_FILTERS]
    outer = [name for name in OUTER_FILTERS if name in wanted]
    inner = [name for name in INNER_FILTERS if name in wanted]
    return [*outer, *others, *inner]
