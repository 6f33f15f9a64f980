"""Metrics of what engines hold: KV events, predictions, indexes, tiers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter, Histogram
from kvproxy.base.metrics.groups import MetricGroup

LOCAL_BUCKETS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
FAST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


class KvEventMetrics(MetricGroup):
    """KV events: one stream per endpoint and data-parallel rank."""

    across = {
        "kvproxy_kv_event_lag_seconds": Across.MAX,
        "kvproxy_kv_event_stream_state": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.batches = Counter(
            "kvproxy_kv_event_batches", "Batches by outcome", ["endpoint", "outcome"], registry=r
        )  # applied, replayed, duplicate, malformed
        self.blocks = Counter("kvproxy_kv_event_blocks", "Blocks in events", ["endpoint", "kind"], registry=r)
        self.skipped = Counter(
            "kvproxy_kv_events_skipped", "Events that could not be used", ["endpoint", "reason"], registry=r
        )  # unknown_type, malformed
        self.gaps = Counter(
            "kvproxy_kv_event_gaps", "Breaks in the numbering", ["endpoint", "outcome"], registry=r
        )  # filled, lost, restart
        self.behind = Counter(
            "kvproxy_kv_event_behind",
            "Times a stream brought batches faster than they were applied",
            ["endpoint"],
            registry=r,
        )
        self.lag = Gauge(
            "kvproxy_kv_event_lag_seconds", "Published to applied, last batch", ["endpoint", "rank"], registry=r
        )
        self.state = Gauge(
            "kvproxy_kv_event_stream_state", "1: the stream is in this state", ["endpoint", "rank", "state"], registry=r
        )  # connecting, exact, degraded, approximate


class KvCacheMetrics(MetricGroup):
    """Holders of prefixes: looked up, predicted, and confirmed."""

    across = {
        "kvproxy_kvcache_prediction_alarm": Across.MAX,
        "kvproxy_kvcache_trust_ratio": Across.MEAN,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.facts_seconds = Histogram(
            "kvproxy_kvcache_facts_seconds",
            "Asking the indexes of the proxy itself about one prompt",
            buckets=LOCAL_BUCKETS_S,
            registry=r,
        )
        self.lookups = Counter(
            "kvproxy_kvcache_lookups",
            "Requests by outcome of the LMCache lookup before routing",
            ["outcome"],
            registry=r,
        )  # hit, miss, lookup_timeout, error, breaker_open, busy, no_tokens
        self.lookup_seconds = Histogram(
            "kvproxy_kvcache_lookup_seconds",
            "One call of the lookup service, late answers included",
            buckets=FAST_BUCKETS_S,
            registry=r,
        )
        self.tokenizes = Counter("kvproxy_kvcache_tokenizes", "Calls of /tokenize", ["outcome"], registry=r)
        self.tokenize_seconds = Histogram(
            "kvproxy_kvcache_tokenize_seconds", "One call of /tokenize", buckets=FAST_BUCKETS_S, registry=r
        )
        self.unknown_instances = Counter(
            "kvproxy_kvcache_unknown_instances", "Holders that are no endpoint's instance_id", registry=r
        )
        self.predictions = Counter(
            "kvproxy_kvcache_predictions",
            "Predicted matches by the engine's reuse",
            ["cluster", "endpoint", "source", "result"],
            registry=r,
        )  # hit, partial, miss
        self.predicted_tokens = Counter(
            "kvproxy_kvcache_predicted_tokens",
            "Matched tokens where requests went",
            ["cluster", "endpoint", "source"],
            registry=r,
        )
        self.reused_tokens = Counter(
            "kvproxy_kvcache_reused_tokens",
            "Of these, tokens the engine did reuse",
            ["cluster", "endpoint", "source"],
            registry=r,
        )
        self.sessions_ended = Counter(
            "kvproxy_kvcache_sessions_ended", "Sessions that their clients ended", ["result"], registry=r
        )  # known, unknown
        self.prediction_alarm = CallbackGauge(
            "kvproxy_kvcache_prediction_alarm",
            "1: of the last 8 large predictions at least 3 were wrong",
            ["cluster", "endpoint", "source"],
            registry=r,
        )
        self.trust = CallbackGauge(
            "kvproxy_kvcache_trust_ratio",
            "Trusted share of claims by this source alone about an endpoint, once tested",
            ["cluster", "endpoint", "source"],
            registry=r,
        )


class IndexMetrics(MetricGroup):
    """Contents of the indexes."""

    across = {
        "kvproxy_kvcache_index_blocks": Across.MAX,
        "kvproxy_kvcache_last_served": Across.MAX,
        "kvproxy_kvcache_index_utilisation_ratio": Across.MAX,
        "kvproxy_kvcache_index_capacity_blocks": Across.MAX,
        "kvproxy_endpoint_reuse_step_tokens": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.index_blocks = Gauge(
            "kvproxy_kvcache_index_blocks", "Blocks held in an index, over endpoints", ["index"], registry=r
        )  # approximate, in_flight, precise, hot
        self.index_bytes = Gauge(
            "kvproxy_kvcache_index_bytes", "Estimated memory of an index", ["index"], registry=r
        )  # approximate, precise, sessions, session_parts, last_served
        self.last_served = Gauge(
            "kvproxy_kvcache_last_served",
            "`sessions` and `responses` whose last endpoint is known",
            ["what"],
            registry=r,
        )  # sessions, responses
        self.index_utilisation = CallbackGauge(
            "kvproxy_kvcache_index_utilisation_ratio",
            "Blocks estimated to be at an endpoint against its capacity",
            ["cluster", "endpoint"],
            registry=r,
        )
        self.index_capacity = CallbackGauge(
            "kvproxy_kvcache_index_capacity_blocks",
            "Capacity of an endpoint's cache, as `told` by it and as `learned`",
            ["cluster", "endpoint", "kind"],
            registry=r,
        )
        self.reuse_step = CallbackGauge(
            "kvproxy_endpoint_reuse_step_tokens",
            "Step of an endpoint's reuse, if it is long",
            ["cluster", "endpoint"],
            registry=r,
        )


class HoldingMetrics(MetricGroup):
    """Contents of the engines and of token memory, and the work to keep them."""

    across = {
        "kvproxy_endpoint_cache_hit_ratio": Across.MEAN,
        "kvproxy_engine_foreign_tokens_ratio": Across.REST,
        "kvproxy_engine_kv_usage_ratio": Across.MAX,
        "kvproxy_engine_requests": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.endpoint_hit_ratio = CallbackGauge(
            "kvproxy_endpoint_cache_hit_ratio",
            "Share of prompt tokens reused since twelve readings of the engine ago",
            ["cluster", "endpoint", "by"],
            registry=r,
        )
        self.engine_foreign_ratio = CallbackGauge(
            "kvproxy_engine_foreign_tokens_ratio",
            "Prompt tokens the engine looked up that others sent, of all",
            ["cluster", "endpoint"],
            registry=r,
        )
        self.engine_kv_usage = CallbackGauge(
            "kvproxy_engine_kv_usage_ratio",
            "KV memory in use, by the engine's own metrics",
            ["cluster", "endpoint"],
            registry=r,
        )
        self.engine_requests = CallbackGauge(
            "kvproxy_engine_requests",
            "Requests in the engine, by its own metrics",
            ["cluster", "endpoint", "state"],
            registry=r,
        )  # running, waiting
        self.token_memory_entries = Gauge(
            "kvproxy_kvcache_token_memory_entries", "Prompts and beginnings in token memory", registry=r
        )
        self.token_memory_bytes = Gauge("kvproxy_kvcache_token_memory_bytes", "Bytes of token memory", registry=r)
        self.recalls = CallbackGauge(
            "kvproxy_kvcache_token_recalls", "Prompts by result of token memory", ["result"], counts=True, registry=r
        )  # exact, prefix, missed
        self.actions = Counter(
            "kvproxy_kvcache_actions", "Actions on prefixes at LMCache", ["action", "result"], registry=r
        )
        self.background = Counter(
            "kvproxy_kvcache_background_jobs", "Work after responses", ["result"], registry=r
        )  # done, failed, timeout, duplicate, dropped, abandoned


class TierMetrics(MetricGroup):
    """Where KV lies."""

    across = {
        "kvproxy_tier_blocks": Across.MAX,
        "kvproxy_tier_tokens": Across.MAX,
        "kvproxy_engine_cached_tokens": Across.MAX,
        "kvproxy_tier_bytes": Across.MAX,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.blocks = CallbackGauge(
            "kvproxy_tier_blocks",
            "Blocks at an endpoint by tier, from its KV events (twice a minute)",
            ["cluster", "endpoint", "tier"],
            registry=r,
        )
        self.tokens = CallbackGauge(
            "kvproxy_tier_tokens", "Tokens of these", ["cluster", "endpoint", "tier"], registry=r
        )
        self.cached = CallbackGauge(
            "kvproxy_engine_cached_tokens",
            "Prompt tokens an engine found cached since its start, by its own counts; unspecified: from a connector",
            ["cluster", "endpoint", "tier"],
            registry=r,
        )  # a tier, peer, unspecified
        self.bytes = CallbackGauge(
            "kvproxy_tier_bytes",
            "KV below engine memory, and its capacity, from LMCache's coordinator; the shared store has no instance",
            ["instance", "tier", "kind"],
            registry=r,
        )  # used, capacity
