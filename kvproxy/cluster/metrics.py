"""Metrics of clusters: decisions, endpoints, speeds."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter, Histogram
from kvproxy.base.metrics.groups import MetricGroup

#: Up to `timeouts.first_byte`.
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COST_BUCKETS = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0, 100_000.0)  # seconds, blocks, scores
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class RoutingMetrics(MetricGroup):
    """Routing decisions and the router queue."""

    across = {
        "kvproxy_router_queue_oldest_wait_seconds": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.picks = Counter("kvproxy_picks", "Routing decisions", ["cluster", "policy", "reason"], registry=r)
        self.preferences = Counter(
            "kvproxy_preferences", "Outcome of a preference for an endpoint", ["result"], registry=r
        )  # followed, unknown, unhealthy, draining, asleep, saturated, excluded, breaker_open
        self.router_queue_wait = Histogram(
            "kvproxy_router_queue_wait_seconds",
            "Time held in the router queue, by requests that were",
            ["cluster"],
            buckets=TTFT_BUCKETS_S,
            registry=r,
        )
        self.router_queue_exits = Counter(
            "kvproxy_router_queue_exits",
            "Requests that left the router queue, or found it full",
            ["cluster", "reason"],
            registry=r,
        )  # turn, max_wait, no_endpoint, queue_off, client_left, refused
        self.router_queue_oldest = Gauge(
            "kvproxy_router_queue_oldest_wait_seconds",
            "How long the first of those in the router queue has waited",
            ["cluster"],
            registry=r,
        )


class EndpointRequestMetrics(MetricGroup):
    """Requests by endpoint."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.finished = Counter("kvproxy_requests", "Requests finished", ["cluster", "endpoint", "status"], registry=r)
        self.attempt_failures = Counter(
            "kvproxy_attempt_failures", "Failed attempts on endpoints", ["cluster", "endpoint", "reason"], registry=r
        )
        self.ttft = Histogram(
            "kvproxy_ttft_seconds",
            "Request received to first body byte from upstream, which is the end of an answer that is not streamed",
            ["cluster", "endpoint", "model", "stream"],
            buckets=TTFT_BUCKETS_S,
            registry=r,
        )  # stream: true, false
        self.duration = Histogram(
            "kvproxy_request_duration_seconds",
            "Request received to its end",
            ["cluster", "endpoint", "model"],
            buckets=E2E_BUCKETS_S,
            registry=r,
        )
        self.itl = Histogram(
            "kvproxy_itl_seconds",
            "Mean time between the tokens of a streamed answer, one observation per request",
            ["cluster", "endpoint", "model"],
            buckets=ITL_BUCKETS_S,
            registry=r,
        )


class EndpointStateMetrics(MetricGroup):
    """Endpoints."""

    across = {
        "kvproxy_endpoint_adapters": Across.MAX,
        "kvproxy_endpoint_up": Across.MIN,
        "kvproxy_discovery_failing": Across.MAX,
        "kvproxy_discovery_left_out": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        where = ["cluster", "endpoint"]
        self.in_flight = Gauge("kvproxy_in_flight_requests", "Requests in flight", where, registry=r)
        self.in_flight_formerly = Gauge(
            "kvproxy_in_flight", "Deprecated name of kvproxy_in_flight_requests", where, registry=r
        )
        self.pending_prompt_tokens = Gauge(
            "kvproxy_pending_prompt_tokens",
            "Uncached prompt tokens without a first token",
            ["cluster", "endpoint"],
            registry=r,
        )
        self.adapters = Gauge(
            "kvproxy_endpoint_adapters", "LoRA adapters that its engine lists", ["cluster", "endpoint"], registry=r
        )
        self.up = Gauge("kvproxy_endpoint_up", "1: takes traffic", ["cluster", "endpoint"], registry=r)
        self.ejections = Counter(
            "kvproxy_ejections", "Endpoints taken out", ["cluster", "endpoint", "reason"], registry=r
        )
        self.cache_losses = Counter(
            "kvproxy_engine_cache_losses",
            "Times an endpoint's engine lost its cache, by how that was noticed",
            ["cluster", "endpoint", "reason"],
            registry=r,
        )  # restarted, cleared, forgot, asleep
        self.probes = Counter("kvproxy_health_probes", "Active probes", ["cluster", "endpoint", "outcome"], registry=r)
        self.rank_refusals = Counter(
            "kvproxy_rank_refusals",
            "Requests whose data-parallel rank an engine refused",
            ["cluster", "endpoint", "outcome"],
            registry=r,
        )  # renumbered, dropped, doubted, late
        self.discovery = Counter("kvproxy_discovery_updates", "Discovery results", ["cluster", "outcome"], registry=r)
        self.discovery_failing = Gauge(
            "kvproxy_discovery_failing",
            "1: this source of endpoints does not answer; its last answer stays in use",
            ["cluster", "source"],
            registry=r,
        )
        self.discovery_left_out = Gauge(
            "kvproxy_discovery_left_out",
            "Objects of this source that cannot be endpoints",
            ["cluster", "source"],
            registry=r,
        )


class SpeedMetrics(MetricGroup):
    """Learned speeds of the engines."""

    across = {
        "kvproxy_learned_prefill_tokens_per_second": Across.MEAN,
        "kvproxy_learned_slowness": Across.MEAN,
        "kvproxy_learned_onboarding_seconds_per_token": Across.MEAN,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.learned_tokens_per_s = CallbackGauge(
            "kvproxy_learned_prefill_tokens_per_second",
            "Prefill speed of a pool before attention, as learned; no series before the first sample",
            ["cluster"],
            registry=r,
        )
        self.learned_slowness = CallbackGauge(
            "kvproxy_learned_slowness",
            "An endpoint's prefill time against its pool's, as learned; no series before the first sample",
            ["cluster", "endpoint"],
            registry=r,
        )
        self.learned_onboarding = CallbackGauge(
            "kvproxy_learned_onboarding_seconds_per_token",
            "Learned time to load a token from a tier; no series for tiers without a load",
            ["cluster", "endpoint", "tier"],
            registry=r,
        )
