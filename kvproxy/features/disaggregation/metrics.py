"""Metrics of prefill apart from decode."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter, histogram

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class DisaggregationMetrics(MetricGroup):
    """Requests in two legs, and the pairs of endpoints that carry them."""

    #: pulled, local, refused, failed, error, left
    requests = counter(
        "kvproxy_disaggregated_requests", "Requests whose prompt another endpoint was to compute", "cluster result"
    )
    #: done, no_handle, timeout, status_4xx, status_5xx, the reason of a failed call
    prefills = counter("kvproxy_disaggregated_prefills", "Prefills for another endpoint", "cluster endpoint result")
    seconds = histogram(
        "kvproxy_disaggregated_prefill_seconds",
        "One prefill for another endpoint, from its request to its answer",
        "cluster",
        buckets=_BUCKETS_S,
    )
    tokens = counter("kvproxy_disaggregated_tokens", "Prompt tokens whose KV a decoder pulled", "cluster")
    #: equal, different, no_effect, versions, failed
    canaries = counter(
        "kvproxy_disaggregation_canaries",
        "Comparisons of 16 tokens, separated and alone, on a pair of endpoints",
        "cluster result",
    )
    #: unproven, good, wrong, no_effect, versions
    pairs = callback_gauge(
        "kvproxy_disaggregation_pairs", "Pairs of endpoints by what is known of them", "cluster state"
    )
