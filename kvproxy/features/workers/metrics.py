"""Metrics of the workers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup


class WorkerMetrics(MetricGroup):
    """Several processes behind one socket."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.workers = CallbackGauge(
            "kvproxy_workers", "Workers that serve; no series where one process does all", registry=r
        )
        self.worker_restarts = Counter("kvproxy_worker_restarts", "Workers started again after they ended", registry=r)
        self.worker_hangs = Counter("kvproxy_worker_hangs", "Workers killed since they hung", registry=r)
