"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.features.shadow.settings import ShadowPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.cluster.feature import SilentPolicy
    from kvproxy.cluster.routing.policy import Policy


class ShadowFeature(Feature):
    """Lets a second policy decide on live traffic without effect."""

    name = "shadow"
    metric_group = "ShadowMetrics"

    def find_silent_policy(self, settings: ClusterSettings) -> PolicyName | None:
        """Return the shadow policy of a cluster."""
        return part_of(settings, ShadowPlace).shadow_policy

    def follow_decisions(self, name: PolicyName, policy: Policy, *, cluster: str, metrics: Metrics) -> SilentPolicy:
        """Return the policy as a shadow."""
        from kvproxy.features.shadow.shadow import Shadow

        return Shadow(policy, name=name.value, cluster=cluster, metrics=metrics)


FEATURE = ShadowFeature()
