"""Metrics of transfers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter, Histogram
from kvproxy.base.metrics.groups import MetricGroup

FAST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


class TransferMetrics(MetricGroup):
    """KV copied to where it will be needed."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.tokens = Counter(
            "kvproxy_kvcache_transferred_tokens",
            "Tokens whose KV was transferred to an endpoint",
            ["endpoint"],
            registry=r,
        )
        self.seconds = Histogram(
            "kvproxy_kvcache_transfer_seconds",
            "One transfer, from its call to its end",
            ["result"],
            buckets=FAST_BUCKETS_S,
            registry=r,
        )  # done, no_effect, timeout, ...
        self.refused = Counter(
            "kvproxy_kvcache_transfers_refused", "Transfers that were not begun", ["reason"], registry=r
        )  # busy, budget, slow
        self.on_demand = Counter(
            "kvproxy_kvcache_transfers_on_demand",
            "Requests for which KV was copied before they went to their engine",
            ["result"],
            registry=r,
        )  # done, late, left, no_effect, timeout, ...
        self.waits = Histogram(
            "kvproxy_kvcache_transfer_wait_seconds",
            "Waits of requests for copies alone (`transfers.max_wait`)",
            buckets=FAST_BUCKETS_S,
            registry=r,
        )
