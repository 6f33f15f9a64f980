"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class Leases(Feature):
    """Keeps prompts for conversations that are expected back."""

    name = "leases"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.leases.metrics import LeaseMetrics

        return (LeaseMetrics,)


FEATURE = Leases()
