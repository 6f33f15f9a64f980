"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings, DiscoverySettings
from kvproxy.features.kubernetes.settings import (
    KubernetesPlace,
)
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.types import Clock, Sleep
    from kvproxy.cluster.feature import WakeCall
    from kvproxy.cluster.sources.entries import Source


class KubernetesFeature(Feature):
    """Finds the endpoints of a cluster in Kubernetes: pods of a service, or with some labels."""

    name = "kubernetes"

    def list_sources(
        self, discovery: DiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep
    ) -> Sequence[Source]:
        """Return the source, where the cluster has the section."""
        settings = part_of(discovery, KubernetesPlace).kubernetes
        if settings is None:
            return ()
        from kvproxy.cluster.sources.entries import Source
        from kvproxy.features.kubernetes.source import KubernetesDiscovery

        found = KubernetesDiscovery(settings, clock=clock, rng=rng, sleep=sleep)
        return (Source("kubernetes", found, follow=found.follow),)

    def make_wake_call(self, settings: ClusterSettings) -> WakeCall | None:
        """Return the scale of the engines' workload, where the section names one."""
        found = part_of(settings.discovery, KubernetesPlace).kubernetes
        if found is None or not found.scale:
            return None
        from kvproxy.features.kubernetes.scale import WorkloadScale

        return WorkloadScale(found)


FEATURE = KubernetesFeature()
