"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class Hygiene(Feature):
    """Finds what keeps the prompts of returning sessions from being reused."""

    name = "hygiene"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.hygiene.metrics import PrefixBreakMetrics

        return (PrefixBreakMetrics,)


FEATURE = Hygiene()
