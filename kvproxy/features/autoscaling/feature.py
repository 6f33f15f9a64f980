"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster


class AutoscalingFeature(Feature):
    """Shows how loaded each cluster is and how many endpoints it should have."""

    name = "autoscaling"
    metric_group = "ScalingMetrics"

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Observe the demand on this cluster."""
        from kvproxy.features.autoscaling.scaling import Autoscaling

        return Autoscaling(cluster)

    def show_clusters(self, metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
        """Two gauges of each cluster whose speeds are learned."""
        from kvproxy.features.autoscaling.scaling import show_scaling

        show_scaling(metrics, clusters, clock=clock)


FEATURE = AutoscalingFeature()
