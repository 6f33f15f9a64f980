"""How requests are served, in the native configuration: the chain, where it leads to, bounds and retries."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvproxy.base.settings.model import Duration, Fraction, Model, Name, Port, Size
from kvproxy.cluster.settings import ClusterSettings, RouteSettings

if TYPE_CHECKING:
    from kvproxy.base.tls.files import ServerTls


class LimitSettings(Model):
    """Bounds on what one client may make the proxy hold."""

    retired = {"headers": "a request may have 256 header fields"}

    body: Size = 32 * 1024 * 1024
    """Largest request body, on every path; a larger one gets 413 and is not read into memory."""
    body_timeout: Duration = Field(default=60.0, gt=0)
    """The whole body must have arrived after this long, on every path; otherwise the client gets 408. Of a body that is
    streamed, only the time spent waiting for the client counts."""
    bodies: Size = 1024 * 1024 * 1024
    """All request bodies held at once; beyond it a request gets 503 with `retry-after`. At least `body`."""
    connections: int = Field(default=10_000, ge=1)
    """Client connections served at once; further ones get 503."""
    head: Size = Field(default=64 * 1024, ge=4096, le=1024 * 1024)
    """Largest request line with its header fields, 256 at most; a larger one gets 431."""
    head_timeout: Duration = Field(default=20.0, le=3600)
    """From a request's first byte (or the connection's start) to the end of its head; then 408. 0: no bound."""
    keep_alive: Duration = Field(default=75.0, le=86_400)
    """A client's connection without a request is closed after this long: set it longer than a load balancer in front of
    the proxy does. 0: never."""
    stall_timeout: Duration = Field(default=120.0, le=86_400)
    """A client that takes no byte of its answer for this long is gone. 0: no bound."""


class TimeoutSettings(Model):
    """How long an engine may take. None bounds a stream as a whole."""

    connect: Duration = 2.0
    """To open a connection to an endpoint."""
    first_byte: Duration = 600.0
    """From the request sent to the first body byte (a long prefill included)."""
    idle: Duration = 300.0
    """Between two pieces of a response."""


class PoolSettings(Model):
    """Connections to each endpoint."""

    retired = {
        "max_response_head": "heads of engines' responses may have 1 MiB",
        "max_idle": "256 connections at most are kept without a request",
        "max_waiting": "4,096 requests may wait for a connection to one endpoint",
    }

    max_connections: int = Field(default=1024, ge=1)
    """Open at once to one endpoint."""
    idle_timeout: Duration = 4.0
    """Closed after this long without a request (uvicorn engines close theirs after 5 s)."""


class RetrySettings(Model):
    """Trying another endpoint, only before the first byte went to the client."""

    retired = {
        "backoff": "pauses begin at 25 ms",
        "max_backoff": "no pause between attempts is longer than a second",
    }

    attempts: int = Field(default=3, ge=1, le=20)
    """Attempts in all, the first included."""
    budget: Fraction = 0.2
    """Retries allowed as a share of recent requests, so that an outage is not multiplied."""
    min_per_second: float = Field(default=1.0, ge=0)
    """Retries allowed regardless of the share, so that a quiet proxy may retry too. Nothing is retried while every
    endpoint is out."""


class LogLevel(StrEnum):
    """Python's levels."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogSettings(Model):
    """The process log."""

    level: LogLevel = LogLevel.INFO
    """Least severe record written."""
    format: Literal["console", "json"] = "console"
    """`console` for people, `json` for machines: every line then, those of the access and the audit log included."""


class FilterSpec(Model):
    """One filter of the chain: its registered name and its settings (typed for the filters shipped here)."""

    name: Name
    """Its registered name."""
    settings: Any = None
    """Its settings, decoded by the filter's own type."""


class ShutdownSettings(Model):
    """Graceful end."""

    drain: Duration = 30.0
    """After SIGTERM no new connections are taken; running requests have this long to finish. The process ends at most
    15 s later in any case."""
    idle: Duration = 5.0
    """For this long of it kept connections stay open without a request: the next one on each is answered with
    `connection: close`, so that a rollout resets no client."""


class ServingSettings(Model):
    """Settings of a chain of filters; the root of a configuration has more."""

    filters: tuple[FilterSpec, ...] = ()
    """`name: {settings}` of filters to add to the default chain or to configure; or the whole chain as a list,
    the last of which is `router`. None: the default chain."""
    clusters: Mapping[str, ClusterSettings] = Field(default_factory=dict)
    """Clusters by name. With only one, `endpoints:` and `policy:` at the top level are short for `clusters.default`."""
    routes: tuple[RouteSettings, ...] = ()
    """Which request goes to which cluster; empty: everything to the only cluster."""
    limits: LimitSettings = LimitSettings()
    """Bounds on clients."""
    timeouts: TimeoutSettings = TimeoutSettings()
    """Bounds on engines."""
    pool: PoolSettings = PoolSettings()
    """Connections to engines."""
    retry: RetrySettings = RetrySettings()
    """Another endpoint when one fails."""
    shutdown: ShutdownSettings = ShutdownSettings()
    """Graceful end."""
    log: LogSettings = LogSettings()
    """The process log."""


class ListenerTls(Model):
    """Certificate of a listener."""

    certificate: str
    """PEM file: the certificate, then its chain."""
    private_key: str
    """PEM file of the private key, without a pass phrase."""
    client_ca: str = ""
    """PEM file of authorities: clients must show a certificate of one of them; empty: none is required."""

    @property
    def files(self) -> ServerTls:
        """The files, to be loaded."""
        from kvproxy.base.tls.files import ServerTls

        return ServerTls(self.certificate, self.private_key, self.client_ca)


class ListenerSettings(Model):
    """Where clients connect. Also written as `host:port`."""

    host: str = "127.0.0.1"
    """Address to bind; `0.0.0.0` for every interface."""
    port: Port = 8888
    """TCP port; 0 takes a free one and prints it."""
    tls: ListenerTls | None = None
    """Serve https with this certificate."""
    reuse_port: bool = False
    """Listen beside another kvproxy at the same port: start the new process, then end the old one. A port that is taken
    by mistake is no error then."""
