"""Metrics of ledger."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class LedgerMetrics(MetricGroup):
    """The ledger."""

    ledger = counter("kvproxy_ledger_entries", "Entries of the ledger", "result")


class CachedCountMetrics(MetricGroup):
    """Counts of cached tokens for clients."""

    #: engine, predicted
    written = counter(
        "kvproxy_cached_counts_written",
        "Counts of cached tokens added to answers whose usage had none, by source",
        "source",
    )
