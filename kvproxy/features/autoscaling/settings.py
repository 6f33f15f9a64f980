"""Settings of autoscaling."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model
from kvproxy.cluster.settings import ClusterSettings


class AutoscalingSettings(Model):
    """Target of `kvproxy_saturation` and `kvproxy_wanted_endpoints`, for policies that learn speeds. kvproxy scales
    nothing itself."""

    retired = {"max_endpoints": "at most 100 are wanted; the autoscaler has the bound that counts"}

    wanted_wait: Duration = Field(default=0.5, gt=0)
    """Prefill that a request may find waiting at its endpoint, in seconds: then saturation is 1."""


class AutoscalingPlace(Model):
    """The section that each cluster gets."""

    autoscaling: AutoscalingSettings = AutoscalingSettings()
    """How many endpoints are wanted, as metrics."""


SETTINGS = FeatureSettings(fields={ClusterSettings: (AutoscalingPlace,)})
