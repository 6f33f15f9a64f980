"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class Picker(Feature):
    """Decides for Envoy, which carries the requests."""

    name = "picker"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.picker.metrics import PickerMetrics

        return (PickerMetrics,)


FEATURE = Picker()
