"""Settings of breakers."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model


class BreakerSettings(Model):
    """Circuit breaker of one endpoint (or of one operation of a helper service)."""

    failure_threshold: int = Field(default=5, ge=1)
    """Failures in a row that open it."""
    recovery_timeout: Duration = 10.0
    """How long it stays open before it lets probes through."""
    half_open_max_calls: int = Field(default=2, ge=1)
    """Probes let through at once while half open."""
