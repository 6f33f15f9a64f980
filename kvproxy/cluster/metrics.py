"""Metrics of clusters: decisions, endpoints, speeds."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter, gauge, histogram

#: Up to `timeouts.first_byte`.
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COST_BUCKETS = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0, 100_000.0)  # seconds, blocks, scores
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class RoutingMetrics(MetricGroup):
    """Routing decisions and the router queue."""

    picks = counter("kvproxy_picks", "Routing decisions", "cluster policy reason")
    #: followed, unknown, unhealthy, draining, asleep, saturated, excluded, breaker_open
    preferences = counter("kvproxy_preferences", "Outcome of a preference for an endpoint", "result")
    router_queue_wait = histogram(
        "kvproxy_router_queue_wait_seconds",
        "Time held in the router queue, by requests that were",
        "cluster",
        buckets=TTFT_BUCKETS_S,
    )
    #: turn, max_wait, no_endpoint, queue_off, client_left, refused
    router_queue_exits = counter(
        "kvproxy_router_queue_exits", "Requests that left the router queue, or found it full", "cluster reason"
    )
    router_queue_oldest = gauge(
        "kvproxy_router_queue_oldest_wait_seconds",
        "How long the first of those in the router queue has waited",
        "cluster",
        across=Across.MAX,
    )


class EndpointRequestMetrics(MetricGroup):
    """Requests by endpoint."""

    finished = counter("kvproxy_requests", "Requests finished", "cluster endpoint status")
    attempt_failures = counter("kvproxy_attempt_failures", "Failed attempts on endpoints", "cluster endpoint reason")
    #: stream: true, false
    ttft = histogram(
        "kvproxy_ttft_seconds",
        "Request received to first body byte from upstream, which is the end of an answer that is not streamed",
        "cluster endpoint model stream",
        buckets=TTFT_BUCKETS_S,
    )
    duration = histogram(
        "kvproxy_request_duration_seconds",
        "Request received to its end",
        "cluster endpoint model",
        buckets=E2E_BUCKETS_S,
    )
    itl = histogram(
        "kvproxy_itl_seconds",
        "Mean time between the tokens of a streamed answer, one observation per request",
        "cluster endpoint model",
        buckets=ITL_BUCKETS_S,
    )


class EndpointStateMetrics(MetricGroup):
    """Endpoints."""

    in_flight = gauge("kvproxy_in_flight_requests", "Requests in flight", "cluster endpoint")
    in_flight_formerly = gauge("kvproxy_in_flight", "Deprecated name of kvproxy_in_flight_requests", "cluster endpoint")
    pending_prompt_tokens = gauge(
        "kvproxy_pending_prompt_tokens", "Uncached prompt tokens without a first token", "cluster endpoint"
    )
    adapters = gauge(
        "kvproxy_endpoint_adapters", "LoRA adapters that its engine lists", "cluster endpoint", across=Across.MAX
    )
    up = gauge("kvproxy_endpoint_up", "1: takes traffic", "cluster endpoint", across=Across.MIN)
    ejections = counter("kvproxy_ejections", "Endpoints taken out", "cluster endpoint reason")
    #: restarted, cleared, forgot, asleep
    cache_losses = counter(
        "kvproxy_engine_cache_losses",
        "Times an endpoint's engine lost its cache, by how that was noticed",
        "cluster endpoint reason",
    )
    probes = counter("kvproxy_health_probes", "Active probes", "cluster endpoint outcome")
    #: renumbered, dropped, doubted, late
    rank_refusals = counter(
        "kvproxy_rank_refusals", "Requests whose data-parallel rank an engine refused", "cluster endpoint outcome"
    )
    discovery = counter("kvproxy_discovery_updates", "Discovery results", "cluster outcome")
    discovery_failing = gauge(
        "kvproxy_discovery_failing",
        "1: this source of endpoints does not answer; its last answer stays in use",
        "cluster source",
        across=Across.MAX,
    )
    discovery_left_out = gauge(
        "kvproxy_discovery_left_out",
        "Objects of this source that cannot be endpoints",
        "cluster source",
        across=Across.MAX,
    )


class SpeedMetrics(MetricGroup):
    """Learned speeds of the engines."""

    learned_tokens_per_s = callback_gauge(
        "kvproxy_learned_prefill_tokens_per_second",
        "Prefill speed of a pool before attention, as learned; no series before the first sample",
        "cluster",
        across=Across.MEAN,
    )
    learned_slowness = callback_gauge(
        "kvproxy_learned_slowness",
        "An endpoint's prefill time against its pool's, as learned; no series before the first sample",
        "cluster endpoint",
        across=Across.MEAN,
    )
    learned_onboarding = callback_gauge(
        "kvproxy_learned_onboarding_seconds_per_token",
        "Learned time to load a token from a tier; no series for tiers without a load",
        "cluster endpoint tier",
        across=Across.MEAN,
    )
