"""Metrics of LMCache: lookups, actions, and its memory."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter, histogram
from kvproxy.cache.metrics import FAST_BUCKETS_S


class LMCacheMetrics(MetricGroup):
    """Lookups, actions on prefixes, and memory by instance."""

    labels = {
        "instance": "an LMCache instance by its id; empty: the store that all of them share",
        "source": "`lmcache_controller` or `lmcache_coordinator`: a lookup",
    }

    #: hit, miss, lookup_timeout, error, breaker_open, busy, no_tokens
    lookups = counter("kvproxy_kvcache_lookups", "Requests by outcome of the LMCache lookup before routing", "outcome")
    lookup_seconds = histogram(
        "kvproxy_kvcache_lookup_seconds",
        "One call of the lookup service, late answers included",
        buckets=FAST_BUCKETS_S,
    )
    unknown_instances = counter("kvproxy_kvcache_unknown_instances", "Holders that are no endpoint's instance_id")
    actions = counter("kvproxy_kvcache_actions", "Actions on prefixes at LMCache", "action result")
    #: used, capacity
    bytes = callback_gauge(
        "kvproxy_tier_bytes",
        "KV below engine memory, and its capacity, from LMCache's coordinator; the shared store has no instance",
        "instance tier kind",
        across=Across.MAX,
    )
