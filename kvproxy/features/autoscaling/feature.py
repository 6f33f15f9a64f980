"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster


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


class AutoscalingFeature(Feature):
    """Shows how loaded each cluster is and how many endpoints it should have."""

    name = "autoscaling"
    metric_group = "ScalingMetrics"
    settings = {ClusterSettings: (AutoscalingPlace,)}

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Observe the demand on this cluster."""
        from kvproxy.features.autoscaling.scaling import Autoscaling

        return Autoscaling(cluster)

    def show_clusters(self, metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
        """Two gauges of each cluster whose speeds are learned."""
        from kvproxy.features.autoscaling.scaling import show_scaling

        show_scaling(metrics, clusters, clock=clock)


FEATURE = AutoscalingFeature()
