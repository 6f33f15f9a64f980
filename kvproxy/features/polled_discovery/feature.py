"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import DiscoverySettings
from kvproxy.features.polled_discovery.settings import PolledPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.types import Clock, Sleep
    from kvproxy.cluster.sources.entries import Source


class PolledDiscoveryFeature(Feature):
    """Finds the endpoints of a cluster in a file and in DNS, which are read again and again."""

    name = "polled_discovery"

    def list_sources(
        self, discovery: DiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep
    ) -> Sequence[Source]:
        """Return a source for each section that the cluster has."""
        settings = part_of(discovery, PolledPlace)
        if settings.file is None and settings.dns is None:
            return ()
        from kvproxy.features.polled_discovery.sources import list_sources

        return list_sources(settings)


FEATURE = PolledDiscoveryFeature()
