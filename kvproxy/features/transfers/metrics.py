"""Metrics of transfers."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter, histogram

FAST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


class TransferMetrics(MetricGroup):
    """KV copied to where it will be needed."""

    tokens = counter("kvproxy_kvcache_transferred_tokens", "Tokens whose KV was transferred to an endpoint", "endpoint")
    #: done, no_effect, timeout, ...
    seconds = histogram(
        "kvproxy_kvcache_transfer_seconds", "One transfer, from its call to its end", "result", buckets=FAST_BUCKETS_S
    )
    #: busy, budget, slow
    refused = counter("kvproxy_kvcache_transfers_refused", "Transfers that were not begun", "reason")
    #: done, late, left, no_effect, timeout, ...
    on_demand = counter(
        "kvproxy_kvcache_transfers_on_demand",
        "Requests for which KV was copied before they went to their engine",
        "result",
    )
    waits = histogram(
        "kvproxy_kvcache_transfer_wait_seconds",
        "Waits of requests for copies alone (`transfers.max_wait`)",
        buckets=FAST_BUCKETS_S,
    )
