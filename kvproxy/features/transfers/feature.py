"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class Transfers(Feature):
    """Copies KV to where it will be needed."""

    name = "transfers"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.transfers.metrics import TransferMetrics

        return (TransferMetrics,)


FEATURE = Transfers()
