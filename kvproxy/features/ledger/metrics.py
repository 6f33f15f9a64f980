"""Metrics of ledger."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter
from kvproxy.base.metrics.groups import MetricGroup


class LedgerMetrics(MetricGroup):
    """The ledger."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.ledger = Counter("kvproxy_ledger_entries", "Entries of the ledger", ["result"], registry=r)
