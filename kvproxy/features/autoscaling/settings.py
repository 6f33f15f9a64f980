"""Settings of autoscaling."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model


class AutoscalingSettings(Model):
    """Target of `kvproxy_saturation` and `kvproxy_wanted_endpoints`, for policies that learn speeds. kvproxy scales
    nothing itself."""

    wanted_wait: Duration = Field(default=0.5, gt=0)
    """Prefill that a request may find waiting at its endpoint, in seconds: then saturation is 1."""
    max_endpoints: int = Field(default=100, ge=1, le=10_000)
    """More are never wanted."""


class AutoscalingPlace(Model):
    """The section that each cluster gets."""

    autoscaling: AutoscalingSettings = AutoscalingSettings()
    """How many endpoints are wanted, as metrics."""
