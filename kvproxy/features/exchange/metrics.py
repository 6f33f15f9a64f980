"""Metrics of exchange."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup


class SyncMetrics(MetricGroup):
    """Several processes that decide as one."""

    across = {
        "kvproxy_sync_status": Across.MAX,
        "kvproxy_sync_consistency_ratio": Across.MIN,
        "kvproxy_sync_peers": Across.MAX,
        "kvproxy_sync_peer_lag_seconds": Across.MAX,
        "kvproxy_sync_index_blocks": Across.MAX,
        "kvproxy_sync_store_up": Across.MIN,
    }
    labels = {
        "peer": "another process: host and worker (at most 256, silent ones for ten minutes)",
        "quantile": "`0.5` or `0.99`",
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.status = Gauge(
            "kvproxy_sync_status", "1: this is the state of the exchange", ["state"], registry=r
        )  # joining, alone, synced, degraded
        self.consistency = CallbackGauge(
            "kvproxy_sync_consistency_ratio",
            "Of the prompts that others routed in the last minute, the share that is known here",
            registry=r,
        )
        self.peers = CallbackGauge("kvproxy_sync_peers", "Other processes by state", ["state"], registry=r)
        # alive, silent
        self.lag = CallbackGauge(
            "kvproxy_sync_peer_lag_seconds",
            "From another process to here, over its latest messages",
            ["peer", "quantile"],
            registry=r,
        )
        self.gaps = CallbackGauge(
            "kvproxy_sync_peer_gaps",
            "Times that something of another process was missing",
            ["peer"],
            counts=True,
            registry=r,
        )
        self.lost = CallbackGauge(
            "kvproxy_sync_peer_lost",
            "Prompts it routed that never became known here",
            ["peer"],
            counts=True,
            registry=r,
        )
        self.index_blocks = CallbackGauge(
            "kvproxy_sync_index_blocks",
            "Blocks in the approximate indexes of each process, by its report; peer `self`: this one",
            ["peer"],
            registry=r,
        )
        self._add_traffic(r)

    def _add_traffic(self, r: CollectorRegistry) -> None:
        self.messages = Counter(
            "kvproxy_sync_messages", "Messages between processes", ["outcome"], registry=r
        )  # sent, received, malformed, failed
        self.bytes = Counter("kvproxy_sync_bytes", "Bytes of these", ["direction"], registry=r)  # in, out
        self.dropped = CallbackGauge(
            "kvproxy_sync_dropped",
            "`deltas` and `messages` that found no room and were never sent, messages `received` that found none, and "
            "deltas that `failed` to be applied",
            ["what"],
            counts=True,
            registry=r,
        )
        self.held = CallbackGauge(
            "kvproxy_sync_held_bytes",
            "Kept for the exchange: `deltas` not sent yet (at most 16 MiB), messages `unsent` (16 MiB for a store, 8 "
            "for each worker), batches `sent` that may be requested again (4 MiB), messages that came `early` (32 "
            "MiB), and while `joining` others' messages and the snapshot (96 MiB)",
            ["what"],
            registry=r,
        )
        self.store_up = CallbackGauge(
            "kvproxy_sync_store_up",
            "1: the common store of the replicas can be reached; absent without one",
            registry=r,
        )
