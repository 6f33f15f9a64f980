"""Metrics of what engines hold: predictions, indexes, tiers."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter, gauge, histogram

LOCAL_BUCKETS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
FAST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


class KvCacheMetrics(MetricGroup):
    """Holders of prefixes: looked up, predicted, and confirmed."""

    facts_seconds = histogram(
        "kvproxy_kvcache_facts_seconds",
        "Asking the indexes of the proxy itself about one prompt",
        buckets=LOCAL_BUCKETS_S,
    )
    tokenizes = counter("kvproxy_kvcache_tokenizes", "Calls of /tokenize", "outcome")
    tokenize_seconds = histogram("kvproxy_kvcache_tokenize_seconds", "One call of /tokenize", buckets=FAST_BUCKETS_S)
    #: hit, partial, miss
    predictions = counter(
        "kvproxy_kvcache_predictions", "Predicted matches by the engine's reuse", "cluster endpoint source result"
    )
    predicted_tokens = counter(
        "kvproxy_kvcache_predicted_tokens", "Matched tokens where requests went", "cluster endpoint source"
    )
    reused_tokens = counter(
        "kvproxy_kvcache_reused_tokens", "Of these, tokens the engine did reuse", "cluster endpoint source"
    )
    #: known, unknown
    sessions_ended = counter("kvproxy_kvcache_sessions_ended", "Sessions that their clients ended", "result")
    prediction_alarm = callback_gauge(
        "kvproxy_kvcache_prediction_alarm",
        "1: of the last 8 large predictions at least 3 were wrong",
        "cluster endpoint source",
        across=Across.MAX,
    )
    trust = callback_gauge(
        "kvproxy_kvcache_trust_ratio",
        "Trusted share of claims by this source alone about an endpoint, once tested",
        "cluster endpoint source",
        across=Across.MEAN,
    )


class IndexMetrics(MetricGroup):
    """Contents of the indexes."""

    #: approximate, in_flight, precise, hot
    index_blocks = gauge(
        "kvproxy_kvcache_index_blocks", "Blocks held in an index, over endpoints", "index", across=Across.MAX
    )
    #: approximate, precise, sessions, session_parts, last_served
    index_bytes = gauge("kvproxy_kvcache_index_bytes", "Estimated memory of an index", "index")
    #: sessions, responses
    last_served = gauge(
        "kvproxy_kvcache_last_served",
        "`sessions` and `responses` whose last endpoint is known",
        "what",
        across=Across.MAX,
    )
    index_utilisation = callback_gauge(
        "kvproxy_kvcache_index_utilisation_ratio",
        "Blocks estimated to be at an endpoint against its capacity",
        "cluster endpoint",
        across=Across.MAX,
    )
    index_capacity = callback_gauge(
        "kvproxy_kvcache_index_capacity_blocks",
        "Capacity of an endpoint's cache, as `told` by it and as `learned`",
        "cluster endpoint kind",
        across=Across.MAX,
    )
    reuse_step = callback_gauge(
        "kvproxy_endpoint_reuse_step_tokens",
        "Step of an endpoint's reuse, if it is long",
        "cluster endpoint",
        across=Across.MAX,
    )


class HoldingMetrics(MetricGroup):
    """Contents of the engines and of token memory, and the work to keep them."""

    endpoint_hit_ratio = callback_gauge(
        "kvproxy_endpoint_cache_hit_ratio",
        "Share of prompt tokens reused since twelve readings of the engine ago",
        "cluster endpoint by",
        across=Across.MEAN,
    )
    engine_foreign_ratio = callback_gauge(
        "kvproxy_engine_foreign_tokens_ratio",
        "Prompt tokens the engine looked up that others sent, of all",
        "cluster endpoint",
        across=Across.REST,
    )
    engine_kv_usage = callback_gauge(
        "kvproxy_engine_kv_usage_ratio",
        "KV memory in use, by the engine's own metrics",
        "cluster endpoint",
        across=Across.MAX,
    )
    #: running, waiting
    engine_requests = callback_gauge(
        "kvproxy_engine_requests",
        "Requests in the engine, by its own metrics",
        "cluster endpoint state",
        across=Across.MAX,
    )
    token_memory_entries = gauge("kvproxy_kvcache_token_memory_entries", "Prompts and beginnings in token memory")
    token_memory_bytes = gauge("kvproxy_kvcache_token_memory_bytes", "Bytes of token memory")
    #: exact, prefix, missed
    recalls = callback_gauge(
        "kvproxy_kvcache_token_recalls", "Prompts by result of token memory", "result", counts=True
    )
    #: done, failed, timeout, duplicate, dropped, abandoned
    background = counter("kvproxy_kvcache_background_jobs", "Work after responses", "result")


class TierMetrics(MetricGroup):
    """Where KV lies."""

    blocks = callback_gauge(
        "kvproxy_tier_blocks",
        "Blocks at an endpoint by tier, from its KV events (twice a minute)",
        "cluster endpoint tier",
        across=Across.MAX,
    )
    tokens = callback_gauge("kvproxy_tier_tokens", "Tokens of these", "cluster endpoint tier", across=Across.MAX)
    #: a tier, peer, unspecified
    cached = callback_gauge(
        "kvproxy_engine_cached_tokens",
        "Prompt tokens an engine found cached since its start, by its own counts; unspecified: from a connector",
        "cluster endpoint tier",
        across=Across.MAX,
    )
