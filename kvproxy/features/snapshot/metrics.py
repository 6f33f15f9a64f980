"""Metrics of snapshot."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup


class SnapshotMetrics(MetricGroup):
    """Metrics of the snapshot."""

    across = {
        "kvproxy_kvcache_snapshot_bytes": Across.MAX,
        "kvproxy_kvcache_snapshot_age_seconds": Across.MIN,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.writes = Counter(
            "kvproxy_kvcache_snapshot_writes", "Snapshots written for the next start", ["outcome"], registry=r
        )  # written, failed
        self.restores = Counter(
            "kvproxy_kvcache_snapshot_restores", "Starts by outcome of the snapshot", ["outcome"], registry=r
        )  # restored, none, or why it was not used
        self.bytes = CallbackGauge("kvproxy_kvcache_snapshot_bytes", "Size of the snapshot there is", registry=r)
        self.age = CallbackGauge(
            "kvproxy_kvcache_snapshot_age_seconds", "Time since the snapshot there is was taken", registry=r
        )
