"""Settings of access_log."""

from __future__ import annotations

from typing import Literal

from kvproxy.base.settings.model import Fraction, Model


class AccessLogSettings(Model):
    """Settings of `access_log`."""

    sample: Fraction = 1.0
    """Share of the requests logged; those that failed (5xx, or broken off) always are."""
    format: Literal["text", "json"] | None = None
    """One readable line, or one JSON object; unset: as `log.format`."""
