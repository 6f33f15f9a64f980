"""Metrics of the process and of receipts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy import __version__
from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import Counter, Histogram
from kvproxy.base.metrics.groups import MetricGroup

LAG_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class ReceiptMetrics(MetricGroup):
    """Decision receipts."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.receipts = Counter(
            "kvproxy_receipts", "Decision receipts", ["result"], registry=r
        )  # written, dropped, failed


class ProcessMetrics(MetricGroup):
    """The process."""

    across = {
        "kvproxy_build_info": Across.MAX,
        "process_max_fds": Across.MAX,
        "process_start_time_seconds": Across.MIN,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.reloads = Counter("kvproxy_reloads", "Configurations read again while running", ["result"], registry=r)
        for result in ("applied", "refused"):
            self.reloads.labels(result)
        self.build_info = Gauge("kvproxy_build_info", "1, with the version of kvproxy", ["version"], registry=r)
        self.build_info.labels(__version__).set(1)
        self.loop_lag = Histogram(
            "kvproxy_event_loop_lag_seconds",
            "How late the event loop woke a task, sampled four times a second",
            buckets=LAG_BUCKETS_S,
            registry=r,
        )
