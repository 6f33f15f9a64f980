"""Metrics of exchange."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter, gauge


class SyncMetrics(MetricGroup):
    """Several processes that decide as one."""

    labels = {
        "peer": "another process: host and worker (at most 256, silent ones for ten minutes)",
        "quantile": "`0.5` or `0.99`",
    }

    #: joining, alone, synced, degraded
    status = gauge("kvproxy_sync_status", "1: this is the state of the exchange", "state", across=Across.MAX)
    consistency = callback_gauge(
        "kvproxy_sync_consistency_ratio",
        "Of the prompts that others routed in the last minute, the share that is known here",
        across=Across.MIN,
    )
    #: alive, silent
    peers = callback_gauge("kvproxy_sync_peers", "Other processes by state", "state", across=Across.MAX)
    lag = callback_gauge(
        "kvproxy_sync_peer_lag_seconds",
        "From another process to here, over its latest messages",
        "peer quantile",
        across=Across.MAX,
    )
    gaps = callback_gauge(
        "kvproxy_sync_peer_gaps", "Times that something of another process was missing", "peer", counts=True
    )
    lost = callback_gauge(
        "kvproxy_sync_peer_lost", "Prompts it routed that never became known here", "peer", counts=True
    )
    index_blocks = callback_gauge(
        "kvproxy_sync_index_blocks",
        "Blocks in the approximate indexes of each process, by its report; peer `self`: this one",
        "peer",
        across=Across.MAX,
    )

    #: sent, received, malformed, failed
    messages = counter("kvproxy_sync_messages", "Messages between processes", "outcome")
    bytes = counter("kvproxy_sync_bytes", "Bytes of these", "direction")  # in, out
    dropped = callback_gauge(
        "kvproxy_sync_dropped",
        "`deltas` and `messages` that found no room and were never sent, and deltas that `failed` to be applied",
        "what",
        counts=True,
    )
    held = callback_gauge(
        "kvproxy_sync_held_bytes",
        "Kept for the exchange: `deltas` not sent yet (at most 16 MiB), messages `unsent` (16 MiB for a store, 8 "
        "for each worker), batches `sent` that may be requested again (4 MiB), and while `joining` the "
        "snapshot (64 MiB)",
        "what",
    )
    store_up = callback_gauge(
        "kvproxy_sync_store_up",
        "1: the common store of the replicas can be reached; absent without one",
        across=Across.MIN,
    )
