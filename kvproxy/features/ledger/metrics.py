"""Metrics of ledger."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class LedgerMetrics(MetricGroup):
    """The ledger."""

    ledger = counter("kvproxy_ledger_entries", "Entries of the ledger", "result")
