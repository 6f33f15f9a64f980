"""The native configuration as one typed, immutable model. Data only: it knows no component.

Every field's description is its documentation; `docs/configuration.md` and the JSON Schema are generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kvproxy.config.values import Duration, Secret, Size

Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
Port = Annotated[int, Field(ge=0, le=65535)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(BaseModel):
    """Strict and immutable: an unknown key is an error, a loaded configuration never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)


class PolicyName(StrEnum):
    """Balancing policies (see docs/policies.md)."""

    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_REQUEST = "least_request"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASH = "consistent_hash"
    SESSION = "session"


class ListenerTls(Model):
    """Certificate of a listener."""

    certificate: str
    """PEM file: the certificate, then its chain."""
    private_key: str
    """PEM file of the private key."""


class Listener(Model):
    """Where clients connect. Also written as `host:port`."""

    host: str = "127.0.0.1"
    """Address to bind; `0.0.0.0` for every interface."""
    port: Port = 8888
    """TCP port; 0 takes a free one and prints it."""
    tls: ListenerTls | None = None
    """Serve https with this certificate."""


class Admin(Model):
    """The operator's listener: metrics, health, status. Never on the public one."""

    enabled: bool = True
    """Turn the admin listener off altogether."""
    host: str = "127.0.0.1"
    """Address to bind; anything but loopback requires `token`."""
    port: Port = 8889
    """TCP port; 0 takes a free one and prints it."""
    token: Secret | None = None
    """Bearer token every admin request must carry."""


class Limits(Model):
    """Bounds on what one client may make the proxy hold."""

    body: Size = 32 * 1024 * 1024
    """Largest request body; a larger one gets 413 and is not read into memory."""
    connections: int = Field(default=10_000, ge=1)
    """Client connections served at once; further ones get 503."""


class Timeouts(Model):
    """How long an engine may take. None bounds a stream as a whole."""

    connect: Duration = 2.0
    """To open a connection to an endpoint."""
    first_byte: Duration = 600.0
    """From the request sent to the first body byte (a long prefill included)."""
    idle: Duration = 300.0
    """Between two pieces of a response."""


class Pool(Model):
    """Connections to each endpoint."""

    max_connections: int = Field(default=1024, ge=1)
    """Open at once to one endpoint."""
    max_idle: int = Field(default=256, ge=0)
    """Kept open without a request, per endpoint."""
    idle_timeout: Duration = 4.0
    """Closed after this long without a request (uvicorn engines close theirs after 5 s)."""
    max_waiting: int = Field(default=4096, ge=0)
    """Requests waiting for a connection to one endpoint; further ones try elsewhere or get 503."""


class Retry(Model):
    """Trying another endpoint, only before the first byte went to the client."""

    attempts: int = Field(default=3, ge=1, le=20)
    """Attempts in all, the first included."""
    budget: Fraction = 0.2
    """Retries allowed as a share of recent requests, so that an outage is not multiplied."""
    min_per_second: float = Field(default=10.0, ge=0)
    """Retries allowed regardless of the share, so that a quiet proxy may retry too."""
    backoff: Duration = 0.025
    """Base of the pause before a retry once every endpoint was tried (full jitter, doubling)."""
    max_backoff: Duration = 1.0
    """Longest pause between attempts."""


class HealthCheck(Model):
    """Active probing and passive ejection of endpoints."""

    active: bool = True
    """Probe each endpoint."""
    path: str = "/health"
    """Path probed; any 2xx is healthy. vLLM's `/v1/models` answers 200 even when its engine is dead."""
    interval: Duration = 5.0
    """Between two probes of one endpoint (jittered)."""
    timeout: Duration = 2.0
    """A slower probe is a failed one."""
    healthy_threshold: int = Field(default=1, ge=1)
    """Probes in a row that bring an endpoint back."""
    unhealthy_threshold: int = Field(default=2, ge=1)
    """Failed probes in a row that take it out."""
    eject_after: int = Field(default=3, ge=0)
    """Failed requests in a row (connect errors, 5xx, timeouts) that eject an endpoint; 0 never ejects."""
    eject_for: Duration = 10.0
    """First ejection's length; doubles with each further one, up to `max_eject_for`."""
    max_eject_for: Duration = 300.0
    """Longest ejection."""
    max_ejected: Fraction = 0.5
    """Largest share of a cluster that passive ejection may take out (at least one endpoint may always be)."""
    slow_start: Duration = 0.0
    """Over this long after it comes back an endpoint's weight grows from a tenth to its own; 0 is off."""


class Breaker(Model):
    """Circuit breaker of one endpoint (or of one operation of a helper service)."""

    failure_threshold: int = Field(default=5, ge=1)
    """Failures in a row that open it."""
    recovery_timeout: Duration = 10.0
    """How long it stays open before it lets probes through."""
    half_open_max_calls: int = Field(default=2, ge=1)
    """Probes let through at once while half open."""


class Endpoint(Model):
    """One engine instance."""

    id: Name
    """Unique in its cluster; shown in `x-kvproxy-endpoint`."""
    url: str
    """`http://host:port` or `https://...`, with a base path if the engine has one."""
    models: tuple[str, ...] = ()
    """Models (and LoRA names) it serves; empty: every model of the cluster."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """Share of traffic relative to the others."""
    instance_id: str = ""
    """Its id at the LMCache controller; empty: the same as `id`."""
    api_key: Secret | None = None
    """Sent to this endpoint alone as `Authorization: Bearer`, instead of the client's."""
    ca_file: str = ""
    """PEM file to verify an https endpoint with; empty: the system's."""
    insecure: bool = False
    """Do not verify an https endpoint's certificate (tests only)."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Free text for people; shown in status."""


class FileDiscovery(Model):
    """Endpoints from a YAML or JSON file (a list of endpoints), watched for changes."""

    path: str
    """The file."""
    interval: Duration = 2.0
    """How often it is looked at."""


class DnsDiscovery(Model):
    """One endpoint for each address a name resolves to."""

    host: str
    """The name."""
    port: Port
    """Port of every endpoint."""
    scheme: Literal["http", "https"] = "http"
    """How to speak to them."""
    interval: Duration = 10.0
    """How often the name is resolved."""
    models: tuple[str, ...] = ()
    """Models they serve."""


class Discovery(Model):
    """Where endpoints come from besides the static list."""

    file: FileDiscovery | None = None
    """From a file."""
    dns: DnsDiscovery | None = None
    """From DNS."""


class Cluster(Model):
    """Endpoints that serve the same models."""

    policy: PolicyName = PolicyName.LEAST_REQUEST
    """How an endpoint is chosen."""
    endpoints: tuple[Endpoint, ...] = ()
    """Static endpoints. Also written as a mapping `id: url`."""
    discovery: Discovery = Discovery()
    """Further endpoints that come and go."""
    health: HealthCheck = HealthCheck()
    """Probing and ejection."""
    breaker: Breaker = Breaker()
    """One breaker per endpoint."""
    max_in_flight: int = Field(default=0, ge=0)
    """Requests one endpoint may have in flight before it counts as saturated; 0: no bound."""


class RouteMatch(Model):
    """What a route applies to; all that is given must hold."""

    prefix: str = "/"
    """Path prefix."""
    model: str = ""
    """Model name in the body, or an alias; a trailing `*` matches any rest; empty: any."""


class Route(RouteMatch):
    """Sends matching requests to a cluster. The first match wins."""

    cluster: str = "default"
    """Name of the cluster."""
    upstream_model: str = ""
    """Model name the engine knows (the route's `model` is then an alias); empty: as the client wrote it."""


class Shutdown(Model):
    """Graceful end."""

    drain: Duration = 30.0
    """After SIGTERM no new requests are taken; running ones have this long to finish."""


class LogLevel(StrEnum):
    """Python's levels."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Log(Model):
    """The process log."""

    level: LogLevel = LogLevel.INFO
    """Least severe record written."""
    format: Literal["console", "json"] = "console"
    """`console` for people, `json` for machines."""


class FilterSpec(Model):
    """One filter of the chain: its registered name and its settings (typed for the filters shipped here)."""

    name: Name
    settings: Any = None


class AccessLogSettings(Model):
    """Settings of `access_log`."""

    sample: Fraction = 1.0
    """Share of successful requests logged; errors always are."""
    format: Literal["text", "json"] = "text"
    """One readable line, or one JSON object."""


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


#: Settings type of every filter shipped here; other people's filters bring their own (entry point `kvproxy.filters`).
FILTER_SETTINGS: dict[str, type[Model]] = {
    "access_log": AccessLogSettings,
    "auth": AuthSettings,
    "cors": CorsSettings,
    "inference_request": InferenceRequestSettings,
    "rate_limit": RateLimitSettings,
    "request_id": RequestIdSettings,
    "router": RouterSettings,
}

DEFAULT_FILTERS: tuple[str, ...] = ("request_id", "access_log", "inference_request", "router")


class Config(Model):
    """A whole kvproxy configuration."""

    listen: Listener = Listener()
    """The public listener. Also written as `host:port`."""
    admin: Admin = Admin()
    """The operator's listener."""
    filters: tuple[FilterSpec, ...] = ()
    """The chain in order: a name, or `name: {settings}`; the last is `router`. Empty: the default chain."""
    clusters: Mapping[str, Cluster] = Field(default_factory=dict)
    """Clusters by name. With only one, `endpoints:` and `policy:` at the top level are short for `clusters.default`."""
    routes: tuple[Route, ...] = ()
    """Which request goes to which cluster; empty: everything to the only cluster."""
    limits: Limits = Limits()
    """Bounds on clients."""
    timeouts: Timeouts = Timeouts()
    """Bounds on engines."""
    pool: Pool = Pool()
    """Connections to engines."""
    retry: Retry = Retry()
    """Another endpoint when one fails."""
    shutdown: Shutdown = Shutdown()
    """Graceful end."""
    log: Log = Log()
    """The process log."""
