"""The part of a Dubbo-go-Pixiu file that is understood, in Pixiu's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from kvproxy.base.settings.model import Duration, Model, Port, Secret


class PixiuModel(Model):
    """As strict as ours; numbers are accepted as ids and names, as Go's decoder does."""

    model_config = ConfigDict(coerce_numbers_to_str=True)


class SocketAddress(PixiuModel):
    """A listener's or an endpoint's address."""

    address: str = ""
    port: Port | None = None
    domains: tuple[str, ...] = ()
    resolver_name: Any = None
    certs_dir: Any = None
    protocol_type: Any = None


class Address(PixiuModel):
    """Around a socket address."""

    socket_address: SocketAddress = SocketAddress()
    name: str = ""


class NamedFilter(PixiuModel):
    """A network or HTTP filter."""

    name: str
    config: Mapping[str, Any] | None = None


class FilterChains(PixiuModel):
    """A listener's network filters."""

    filters: tuple[NamedFilter, ...] = ()


class ListenerTimeouts(PixiuModel):
    """Go's server timeouts."""

    idle_timeout: Duration = 20.0
    read_timeout: Duration = 20.0
    write_timeout: Duration = 20.0
    max_header_bytes: Any = None


class PixiuListener(PixiuModel):
    """A server."""

    name: str = ""
    protocol_type: str = "HTTP"
    address: Address = Address()
    filter_chains: FilterChains = FilterChains()
    config: ListenerTimeouts | None = None


class RouteMatch(PixiuModel):
    """Conditions of a route."""

    prefix: str = ""
    path: str = ""
    methods: tuple[str, ...] = ()
    headers: Any = None


class RouteAction(PixiuModel):
    """Where it goes."""

    cluster: str
    cluster_not_found_response_code: int = 0


class PixiuRoute(PixiuModel):
    """One route."""

    id: str = ""
    match: RouteMatch = RouteMatch()
    route: RouteAction


class RouteConfig(PixiuModel):
    """The routes of a connection manager."""

    routes: tuple[PixiuRoute, ...] = ()
    dynamic: bool = False


class ConnectionManager(PixiuModel):
    """`dgp.filter.httpconnectionmanager`."""

    route_config: RouteConfig = RouteConfig()
    http_filters: tuple[NamedFilter, ...] = ()
    server_name: Any = None
    generate_request_id: Any = None
    idle_timeout: Any = None
    timeout: Any = None


def _names(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


CommaSeparated = Annotated[tuple[str, ...], BeforeValidator(_names)]


class LlmProxy(PixiuModel):
    """`dgp.filter.llm.proxy` and `dgp.filter.http.httpproxy`, whose names Go reads in any case."""

    @model_validator(mode="before")
    @classmethod
    def _in_any_case(cls, raw: Any) -> Any:
        known = {name.casefold(): name for name in (field.alias or key for key, field in cls.model_fields.items())}
        return {known.get(str(k).casefold(), k): v for k, v in raw.items()} if isinstance(raw, Mapping) else raw

    timeout: Duration | None = None
    max_idle: int = Field(default=0, ge=0, alias="maxIdleConns")
    max_idle_per_host: int = Field(default=0, ge=0, alias="maxIdleConnsPerHost")
    max_per_host: int = Field(default=0, ge=0, alias="maxConnsPerHost")
    scheme: Literal["http", "https"] = "http"


class Cors(PixiuModel):
    """`dgp.filter.http.cors`; its lists are lists, or names with commas between."""

    allow_origin: tuple[str, ...] = ()
    allow_methods: CommaSeparated = ()
    allow_headers: CommaSeparated = ()
    expose_headers: CommaSeparated = ()
    max_age: Annotated[Duration | None, BeforeValidator(lambda age: None if age == "" else age)] = None
    allow_credentials: bool = False


class Tokenizer(PixiuModel):
    """`dgp.filter.llm.tokenizer`."""

    log_to_console: bool = False


class RetrySettings(PixiuModel):
    """A retry policy's numbers."""

    times: int | None = Field(default=None, ge=0)
    initial: Duration = Field(default=0.1, alias="initialInterval")
    longest: Duration = Field(default=5.0, alias="maxInterval")
    multiplier: float = Field(default=2.0, ge=1, le=10)


class RetryPolicy(RetrySettings):
    """A retry policy; its numbers stand beside the name or in `config`."""

    name: Literal["NoRetry", "CountBased", "ExponentialBackoff"] = "NoRetry"
    config: RetrySettings | None = None


class LlmMeta(PixiuModel):
    """An endpoint's LLM settings."""

    provider: str = ""
    api_key: Annotated[Secret | None, BeforeValidator(lambda key: None if key == "" else key)] = None
    fallback: bool = False
    health_check_interval: int | None = Field(default=None, ge=0)
    retry_policy: RetryPolicy = RetryPolicy()


class PixiuEndpoint(PixiuModel):
    """An upstream."""

    id: str = ""
    upper_id: str = Field(default="", alias="ID")
    name: str = ""
    socket_address: SocketAddress = SocketAddress()
    meta: Mapping[str, str] = Field(default_factory=dict)
    llm_meta: LlmMeta | None = None


class Consistent(PixiuModel):
    """Sizes of Pixiu's hash rings."""

    replica_num: int = Field(default=0, ge=0)
    max_vnode_num: int = Field(default=0, ge=0)
    maglev_table_size: int = Field(default=0, ge=0)


class PixiuHealthCheck(PixiuModel):
    """Active probing."""

    protocol: str = "tcp"
    timeout: Duration = 1.0
    interval: Duration = 3.0
    interval_jitter: Any = None
    initial_delay_seconds: Any = None
    healthy_threshold: int = Field(default=5, ge=1)
    unhealthy_threshold: int = Field(default=5, ge=1)


class PixiuCluster(PixiuModel):
    """Upstreams."""

    name: str
    type: str = "Static"
    lb_policy: str = ""
    consistent: Consistent | None = None
    health_checks: tuple[PixiuHealthCheck, ...] = ()
    endpoints: tuple[PixiuEndpoint, ...] = ()


class ShutdownConfig(PixiuModel):
    """Graceful end."""

    timeout: Duration = 60.0
    step_timeout: Duration = 10.0
    reject_policy: str = "immediacy"


class Metric(PixiuModel):
    """Prometheus listener."""

    enable: bool = False
    prometheus_port: Port = 2222


class Resources(PixiuModel):
    """Listeners and clusters."""

    listeners: tuple[PixiuListener, ...] = ()
    clusters: tuple[PixiuCluster, ...] = ()
    shutdown_config: ShutdownConfig | None = None
    adapters: Any = None
    pprof: Any = Field(default=None, alias="pprofConf")


class PixiuFile(Resources):
    """A whole file: the resources below `static_resources`, or at the top."""

    static_resources: Resources | None = None
    dynamic_resources: Any = None
    metric: Metric | None = None
    node: Any = None
