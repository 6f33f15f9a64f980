"""Metrics of the workers."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter


class WorkerMetrics(MetricGroup):
    """Several processes behind one socket."""

    workers = callback_gauge("kvproxy_workers", "Workers that serve; no series where one process does all")
    worker_restarts = counter("kvproxy_worker_restarts", "Workers started again after they ended")
    worker_hangs = counter("kvproxy_worker_hangs", "Workers killed since they hung")
