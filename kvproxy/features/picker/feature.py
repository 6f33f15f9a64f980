"""The feature, as the core meets it."""

from __future__ import annotations

from kvproxy.operate.feature import Feature


class Picker(Feature):
    """Decides for Envoy, which carries the requests."""

    name = "picker"
    metric_group = "PickerMetrics"


FEATURE = Picker()
