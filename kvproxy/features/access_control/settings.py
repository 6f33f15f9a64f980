"""Settings of access control."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field

from kvproxy.base.settings.feature_settings import AddedFilter, FeatureSettings, FilterOrder
from kvproxy.base.settings.model import Model, Name, Secret
from kvproxy.base.settings.paths import Finding, Path, error_at, missing_file, warning_at
from kvproxy.operate.config.schema import Config, find_filters


class CorsSettings(Model):
    """Settings of `cors` (Starlette's CORSMiddleware)."""

    retired = {
        "allow_methods": "GET, POST and DELETE are allowed",
        "allow_headers": "every request header is allowed",
        "max_age": "preflight answers may be cached for 10 minutes",
    }

    allow_origins: tuple[str, ...] = ()
    """Origins that may call; `*` for any."""
    allow_origin_regex: str = ""
    """Or a regular expression for them."""
    allow_credentials: bool = False
    """Let browsers send cookies and authorization."""
    expose_headers: tuple[str, ...] = ("x-request-id", "x-kvproxy-endpoint", "retry-after")
    """Response headers a page may read."""


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


def verify(config: Config) -> Iterator[Finding]:
    """Yield settings with which a filter would admit no client, or any page."""
    for at, auth in find_filters(config, AuthSettings):
        yield from _auth(auth, at)
    for at, cors in find_filters(config, CorsSettings):
        yield from _cors(cors, at)
    for at, limits in find_filters(config, RateLimitSettings):
        yield from _rate_limit(limits, at)


def _auth(settings: AuthSettings, at: Path) -> Iterator[Finding]:
    if not settings.keys and not settings.file:
        yield error_at((*at, "keys"), "auth has neither keys nor a file: it would refuse everything", absence=True)
    if settings.file:
        yield from missing_file((*at, "file"), settings.file)
    seen: set[str] = set()
    for index, key in enumerate(settings.keys):
        if key.key.get_secret_value() in seen:
            yield error_at((*at, "keys", index, "key"), "the same key is given twice: its owner would be ambiguous")
        seen.add(key.key.get_secret_value())
    for index, path in enumerate(settings.exempt_paths):
        if not path.startswith("/"):
            yield error_at((*at, "exempt_paths", index), "must start with /")


def _cors(settings: CorsSettings, at: Path) -> Iterator[Finding]:
    if not settings.allow_origins and not settings.allow_origin_regex:
        yield error_at((*at, "allow_origins"), "cors allows no origin")
    if settings.allow_credentials and "*" in settings.allow_origins:
        yield error_at((*at, "allow_credentials"), "with the origin * any page could act with a user's credentials")
    try:
        re.compile(settings.allow_origin_regex)
    except re.error as fault:
        yield error_at((*at, "allow_origin_regex"), f"not a regular expression: {fault.msg}")


def _rate_limit(settings: RateLimitSettings, at: Path) -> Iterator[Finding]:
    if not settings.requests_per_minute and not settings.tokens_per_minute:
        yield warning_at((*at, "requests_per_minute"), "rate_limit has no limit")


SETTINGS = FeatureSettings(
    filters={
        "cors": AddedFilter(CorsSettings, "inference_request"),
        "auth": AddedFilter(AuthSettings, "inference_request"),
        "rate_limit": AddedFilter(RateLimitSettings, "inference_request"),
    },
    filter_order=(
        FilterOrder(
            "auth", "rate_limit", "rate_limit counts by client address, since auth names the tenant only later"
        ),
        FilterOrder("auth", "kvcache", "kvcache works for requests that auth then refuses"),
        FilterOrder("cors", "auth", "auth refuses browsers' preflight requests before cors can answer them"),
    ),
    verify=verify,
)
