"""Settings of the shield."""

from __future__ import annotations

from enum import StrEnum

from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.operate.config.schema import Config


class ShieldMode(StrEnum):
    """Requests that would harm an engine, by the advisories for its version."""

    OFF = "off"  # engines' versions are not queried
    WARN = "warn"  # counted and logged
    REFUSE = "refuse"  # sent to an engine without the fault, else refused


class ShieldPlace(Model):
    """The top level."""

    shield: ShieldMode = ShieldMode.WARN
    """Requests that would harm an engine by a known fault of its version: `refuse` sends them to
    an engine without the fault, or answers 400 where there is none; `warn` counts and logs them; `off` does nothing."""


SETTINGS = FeatureSettings(fields={Config: (ShieldPlace,)})
