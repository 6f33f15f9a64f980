"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class Snapshot(Feature):
    """Keeps what is known over a restart."""

    name = "snapshot"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.snapshot.metrics import SnapshotMetrics

        return (SnapshotMetrics,)


FEATURE = Snapshot()
