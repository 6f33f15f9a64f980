"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class Ledger(Feature):
    """Writes down tokens by tenant and model, to be billed."""

    name = "ledger"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.ledger.metrics import LedgerMetrics

        return (LedgerMetrics,)


FEATURE = Ledger()
