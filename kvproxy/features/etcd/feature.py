"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import DiscoverySettings
from kvproxy.features.etcd.settings import EtcdPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.types import Clock, Sleep
    from kvproxy.cluster.sources.entries import Source


class EtcdFeature(Feature):
    """Finds the endpoints of a cluster in etcd: one for each key below a prefix."""

    name = "etcd"

    def list_sources(
        self, discovery: DiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep
    ) -> Sequence[Source]:
        """Return the source, where the cluster has the section."""
        settings = part_of(discovery, EtcdPlace).etcd
        if settings is None:
            return ()
        from kvproxy.cluster.sources.entries import Source
        from kvproxy.features.etcd.source import EtcdDiscovery

        found = EtcdDiscovery(settings, clock=clock, rng=rng, sleep=sleep)
        return (Source("etcd", found, follow=found.follow),)


FEATURE = EtcdFeature()
