"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import DiscoverySettings
from kvproxy.features.etcd.settings import EtcdPlace, find_faults
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.settings.paths import Finding
    from kvproxy.base.types import Clock, Sleep
    from kvproxy.cluster.sources.entries import WatchedDiscovery
    from kvproxy.operate.config.schema import Config


class EtcdFeature(Feature):
    """Finds the endpoints of a cluster in etcd: one for each key below a prefix."""

    name = "etcd"
    settings = {DiscoverySettings: (EtcdPlace,)}

    def list_sources(
        self, discovery: DiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep
    ) -> Mapping[str, WatchedDiscovery]:
        """Return the source, where the cluster has the section."""
        settings = part_of(discovery, EtcdPlace).etcd
        if settings is None:
            return {}
        from kvproxy.features.etcd.source import EtcdDiscovery

        return {"etcd": EtcdDiscovery(settings, clock=clock, rng=rng, sleep=sleep)}

    def verify(self, config: Config) -> Iterator[Finding]:
        """Check the URLs, and that the file is there."""
        for name, cluster in config.clusters.items():
            settings = part_of(cluster.discovery, EtcdPlace).etcd
            if settings is not None:
                yield from find_faults(settings, ("clusters", name, "discovery", "etcd"))


FEATURE = EtcdFeature()
