"""Settings of access_log."""

from __future__ import annotations

from kvproxy.base.settings.model import Fraction, Model


class AccessLogSettings(Model):
    """Settings of `access_log`."""

    retired = {"format": "its lines have the format of the process log (log.format)"}

    sample: Fraction = 1.0
    """Share of the requests logged; those that failed (5xx, or broken off) always are."""
