"""Clusters in the native configuration: endpoints, how one is chosen (and policies' parameters), what takes one out."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator

from kvproxy.base.settings.model import (
    BreakerSettings,
    Duration,
    EndpointName,
    Fraction,
    HeaderName,
    Model,
    Secret,
)


class DiscoverySettings(Model):
    """Where endpoints come from besides the static list: a section for each source."""

    @property
    def named(self) -> bool:
        """True if any source is configured."""
        return any(getattr(self, name) is not None for name in type(self).model_fields)


#: Of a setting: on where it helps.
AUTO: Final = "auto"


class EnginePriorityMode(StrEnum):
    """When forwarded requests carry `priority`, by which an engine orders its waiting requests."""

    OFF = "off"  # bodies stay as clients sent them
    ON = "on"  # the engines are started for it
    AUTO = "auto"  # until an engine is found to ignore it


class PriorityOrder(StrEnum):
    """Order in which an engine admits numbers."""

    LOWEST_FIRST = "lowest_first"  # vLLM with `--scheduling-policy priority`
    HIGHEST_FIRST = "highest_first"  # SGLang with `--enable-priority-scheduling`


#: As many as vLLM can name.
Rank = Annotated[int, Field(ge=0, le=65535)]

_EVENT_ADDRESS = r"^(tcp://\S+:[1-9]\d{0,4})?$"


class PolicyName(StrEnum):
    """Balancing policies (see docs/policies.md)."""

    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_REQUEST = "least_request"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASH = "consistent_hash"
    SESSION = "session"
    KV_AWARE = "kv_aware"
    PREFIX_AFFINITY = "prefix_affinity"
    DYNAMO = "dynamo"
    DYNAMO_AGENTIC = "dynamo_agentic"
    LLM_D = "llm_d"
    LLM_D_STICKY = "llm_d_sticky"
    LMETRIC = "lmetric"
    LEAST_TTFT = "least_ttft"


#: Policies that only a feature has.
OPTIONAL_POLICIES = frozenset(
    {
        PolicyName.CONSISTENT_HASH,
        PolicyName.SESSION,
        PolicyName.DYNAMO,
        PolicyName.DYNAMO_AGENTIC,
        PolicyName.LLM_D,
        PolicyName.LLM_D_STICKY,
        PolicyName.LMETRIC,
        PolicyName.LEAST_TTFT,
        PolicyName.PREFIX_AFFINITY,
    }
)


class HealthCheckSettings(Model):
    """Active probing and passive ejection of endpoints.

    When no endpoint of a model is well, all of them are used again (panic), so that probes that fail for all of them
    never make a full outage. An endpoint that never passed a probe is out after the first failed one.
    """

    retired = {
        "max_eject_for": "ejections last five minutes at most, or eject_for if it is longer",
        "slow_start": "an endpoint that comes back has its whole weight: no figure supported another",
    }

    active: bool = True
    """Probe each endpoint."""
    path: str = "/health"
    """Path probed; any 2xx is healthy. vLLM's `/v1/models` answers 200 even when its engine is dead."""
    interval: Duration = 1.0
    """Between two probes of one endpoint (jittered). An idle engine's death is noticed after about this long."""
    timeout: Duration = 2.0
    """A slower probe is a failed one."""
    healthy_threshold: int = Field(default=1, ge=1)
    """Probes in a row that bring an endpoint back."""
    unhealthy_threshold: int = Field(default=2, ge=1)
    """Failed probes in a row that take it out."""
    eject_after: int = Field(default=3, ge=0)
    """Failed requests in a row (connect errors, 5xx, timeouts) that eject an endpoint; 0 never ejects."""
    eject_for: Duration = 10.0
    """First ejection's length; doubles with each further one, up to five minutes or this, if it is longer."""
    max_ejected: Fraction = 0.5
    """Largest share of a cluster that passive ejection may take out (at least one endpoint may always be)."""


class EndpointRetrySettings(Model):
    """Retries of a failed attempt on one endpoint, before the first byte went to the client."""

    attempts: int = Field(default=1, ge=1, le=20)
    """Attempts on this endpoint in a row, the first included, before another one is tried."""
    backoff: Duration = 0.1
    """Pause before the second attempt on it; each further one is `multiplier` times longer."""
    max_backoff: Duration = 5.0
    """Longest of these pauses."""
    multiplier: float = Field(default=2.0, ge=1, le=10)
    """Growth of the pause; 1 keeps it constant."""
    fallback: bool = True
    """Then try another endpoint, as `retry` allows; false: this endpoint's failure is the answer."""


class EventSources(Model):
    """Addresses of KV events for engines that do not report them (vLLM without `/kv_event_sources`).

    As in their `--kv-events-config`: only ports are taken, the host is the endpoint's own. Each further data-parallel
    rank publishes one port higher."""

    endpoint: str = Field(default="", pattern=_EVENT_ADDRESS)
    """Such as `tcp://*:5557`; empty: such engines are not followed."""
    replay_endpoint: str = Field(default="", pattern=_EVENT_ADDRESS)
    """Such as `tcp://*:5558`; empty: a gap in the events cannot be filled."""
    data_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Ranks of each engine."""


class DataParallelSettings(Model):
    """Ranks of an engine that runs data-parallel (vLLM's `--data-parallel-size`, SGLang's `--dp-size`) behind one
    address. Each has a cache of its own, so each is a candidate of its own, `ID@RANK`."""

    steer: bool = True
    """Choose the rank for each request and name it in `x-data-parallel-rank`; false: the engine balances."""
    ranks: tuple[Rank, ...] = Field(default=(), max_length=256)
    """Their numbers in the whole deployment, such as 4 to 7 for the second of two servers with four each; empty: found
    out if the engine's metrics and its KV event sources agree."""

    @field_validator("ranks")
    @classmethod
    def _distinct(cls, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(ranks)) < len(ranks):
            raise ValueError("a rank stands there twice")
        return ranks


class EndpointRole(StrEnum):
    """Parts of a request that an endpoint computes, where prefill and decode may be apart."""

    BOTH = "both"
    PREFILL = "prefill"  # it takes no whole request
    DECODE = "decode"  # it prefills for no other endpoint


class EndpointSettings(Model):
    """One engine instance."""

    id: EndpointName
    """Unique in its cluster; shown in `x-kvproxy-endpoint`."""
    url: str
    """`http://host:port` or `https://...`, with a base path if the engine has one."""
    models: tuple[str, ...] = ()
    """Models (and LoRA names) it serves; empty: every model of the cluster."""
    role: EndpointRole = EndpointRole.BOTH
    """Part of requests that it computes: `prefill` endpoints compute prompts for others and take no whole request,
    `decode` ones prefill for no other endpoint."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """Share of traffic relative to the others; of an engine with data-parallel ranks, that of each."""
    instance_id: str = ""
    """Its id at the LMCache controller; empty: the same as `id`."""
    shared_kv: bool = True
    """It reads the store that LMCache's directory calls shared, and shares the entries of all engines there."""
    api_key: Secret | None = None
    """Sent to this endpoint alone as `Authorization: Bearer`, instead of the client's."""
    ca_file: str = ""
    """PEM file to verify an https endpoint with; empty: the system's."""
    cert_file: str = ""
    """PEM file of the certificate to show an https endpoint that requires one (vLLM's `--ssl-cert-reqs 2`), then its
    chain; empty: none."""
    key_file: str = ""
    """PEM file of its private key, without a pass phrase; empty: it is in `cert_file`."""
    server_name: str = ""
    """Name its certificate and the Host header are for, where `url` has an address; empty: the host in `url`."""
    insecure: bool = False
    """Do not verify an https endpoint's certificate (tests only)."""
    kv_event_sources: EventSources = EventSources()
    """Addresses of its KV events, for an older engine; unset: those in `kv_event_sources` of the kvcache filter."""
    data_parallel: DataParallelSettings | None = None
    """As the cluster's, for this engine alone; unset: the cluster's."""
    retry: EndpointRetrySettings | None = None
    """Attempts on this endpoint itself; unset: one, then another endpoint as set by `retry` at the top."""
    engine_priority: EnginePriorityMode | None = None
    """As the cluster's, for this engine alone; unset: the cluster's."""
    engine_priority_order: PriorityOrder | None = None
    """As the cluster's, for this engine alone; unset: the cluster's."""
    ready: bool = True
    """False: it takes no new requests and finishes those it has. Set by sources of endpoints, for a pod that is no
    longer ready."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Free text for people; shown in status."""


class RouterQueueSettings(Model):
    """Holding requests at the proxy while all endpoints that serve their model have enough to prefill, so that short
    ones may overtake."""

    retired = {
        "admit_below": "no request waits while an endpoint has less than 0.3 s of prefill pending",
        "ageing": "a second of waiting outweighs 0.3 s of own prefill",
    }

    enabled: bool | Literal["auto"] = True
    """`auto`, the default without a `queue`: on with kv_aware, and no request is refused by it. `queue: {}` keeps to
    `limit` and, with `discovery`, waits for a first endpoint; also for least_ttft. `false`: none waits."""
    limit: int = Field(default=1024, ge=1, le=100_000)
    """Requests held; further ones get 429 with `retry-after`, or with `auto` go to their endpoint at once."""
    max_wait: Duration = 540.0
    """Then a request goes out, whatever is pending at the endpoints. A bound for clients that would give up, not a part
    of the order: such a request overtakes more urgent ones."""
    priority_header: HeaderName = ""
    """Header with an integer from -100 to 100, larger first; empty: all are alike. Let clients you trust send it. One
    level is worth 3 s of prefill; in engines that take a `priority` too."""


class ClusterSettings(Model):
    """Endpoints that serve the same models."""

    retired = {
        "tier_weights": "what loading from each tier costs is learned from the first samples on",
        "parameters": "the weights of kv_aware are the measured ones, those of the others their originals'",
    }

    policy: PolicyName = PolicyName.KV_AWARE
    """How an endpoint is chosen."""
    client_policies: tuple[PolicyName, ...] = ()
    """Policies a client may ask for instead, in `x-kvproxy-policy`; empty: none may. The cluster's own may
    always be named then."""
    endpoints: tuple[EndpointSettings, ...] = ()
    """Static endpoints. Also written as a mapping `id: url`."""
    discovery: DiscoverySettings = DiscoverySettings()
    """Further endpoints that come and go."""
    health: HealthCheckSettings = HealthCheckSettings()
    """Probing and ejection."""
    breaker: BreakerSettings = BreakerSettings()
    """One breaker per endpoint."""
    max_in_flight: int = Field(default=0, ge=0)
    """Requests one endpoint (of an engine with data-parallel ranks: each rank) may have in flight before it counts as
    saturated; 0: no bound."""
    data_parallel: DataParallelSettings = DataParallelSettings()
    """Ranks of the engines that have several behind one address."""
    queue: RouterQueueSettings = RouterQueueSettings(enabled=AUTO)
    """The router queue, for policies that estimate prefill times (kv_aware, least_ttft). Given with `discovery`
    it also holds requests while there is no endpoint at all, until one is found."""
    engine_priority: EnginePriorityMode = EnginePriorityMode.OFF
    """Order of admission that engines get in the body's `priority`, for the same policies: `on` if they are started for
    it, `auto` while several requests wait in the engine and unless it refuses the number, `off`."""
    engine_priority_order: PriorityOrder = PriorityOrder.LOWEST_FIRST
    """Number that these engines admit first: vLLM the lowest, SGLang the highest (unless it is started with
    `--schedule-low-priority-values-first`)."""

    @property
    def queues(self) -> bool:
        """True if requests may wait at the proxy."""
        enabled = self.queue.enabled
        return self.policy is PolicyName.KV_AWARE if enabled == AUTO else enabled


class RouteMatch(Model):
    """Conditions of a route; all that are given must hold."""

    prefix: str = "/"
    """Path prefix."""
    model: str = ""
    """Model name in the body, or an alias; a trailing `*` matches any rest; empty: any."""


class RouteSettings(RouteMatch):
    """Sends matching requests to a cluster. The first match wins."""

    cluster: str = "default"
    """Name of the cluster."""
    upstream_model: str = ""
    """Model name in the engine (the route's `model` is then an alias); empty: as the client wrote it."""
