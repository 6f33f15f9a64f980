"""Metrics of snapshot."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter


class SnapshotMetrics(MetricGroup):
    """Metrics of the snapshot."""

    #: written, failed
    writes = counter("kvproxy_kvcache_snapshot_writes", "Snapshots written for the next start", "outcome")
    #: restored, none, or why it was not used
    restores = counter("kvproxy_kvcache_snapshot_restores", "Starts by outcome of the snapshot", "outcome")
    bytes = callback_gauge("kvproxy_kvcache_snapshot_bytes", "Size of the snapshot there is", across=Across.MAX)
    age = callback_gauge(
        "kvproxy_kvcache_snapshot_age_seconds", "Time since the snapshot there is was taken", across=Across.MIN
    )
