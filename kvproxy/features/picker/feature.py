"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.features.picker.settings import PickerPlace, PickerSettings
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.settings.paths import Finding


class Picker(Feature):
    """Decides for Envoy, which carries the requests."""

    name = "picker"
    metric_group = "PickerMetrics"
    settings = {Config: (PickerPlace,)}
    read_at_start = ("picker",)

    def verify(self, config: Config) -> Iterable[Finding]:
        """Return faults of the listener, if there is a section for it."""
        settings = _settings(config)
        if settings is None:
            return ()
        from kvproxy.features.picker.verify import find_faults

        return find_faults(settings, config)

    def list_certificates(self, config: Config) -> Iterable[tuple[str, str]]:
        """Return the listener's."""
        settings = _settings(config)
        if settings is None or settings.tls is None:
            return ()
        return (("picker.tls.certificate", settings.tls.certificate),)


def _settings(config: Config) -> PickerSettings | None:
    return part_of(config, PickerPlace).picker


FEATURE = Picker()
