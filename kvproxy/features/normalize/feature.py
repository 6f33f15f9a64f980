"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class Normalize(Feature):
    """Rewrites prompts so that engines can reuse them."""

    name = "normalize"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.normalize.metrics import NormalizeMetrics

        return (NormalizeMetrics,)


FEATURE = Normalize()
