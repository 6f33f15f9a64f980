"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.features.engine_sleep.settings import SleepPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts
    from kvproxy.cluster.feature import WakeCall
    from kvproxy.proxy.filters.chain import FilterType
    from kvproxy.proxy.settings import ServingSettings


class EngineSleepFeature(Feature):
    """Wakes engines for requests, and puts idle ones to sleep."""

    name = "engine_sleep"
    metric_group = "SleepMetrics"

    def wakes_engines(self, settings: ClusterSettings) -> bool:
        """Return whether the cluster asks for it."""
        return part_of(settings, SleepPlace).wake_within > 0

    def make_wake_call(self, settings: ClusterSettings) -> WakeCall | None:
        """Return the HTTP call, where there is one."""
        own = part_of(settings, SleepPlace)
        if own.wake_call is None:
            return None
        from kvproxy.features.engine_sleep.call import HttpWakeCall

        return HttpWakeCall(own.wake_call)

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None where no cluster asks for it."""
        from kvproxy.features.engine_sleep.engines import EngineSleep

        return EngineSleep(parts) if any(self.wakes_engines(one.settings) for one in parts.clusters.values()) else None

    def list_guards(self, config: ServingSettings) -> Sequence[tuple[str, FilterType]]:
        """Return the filter that holds requests, where a cluster asks for it."""
        from kvproxy.features.engine_sleep.filter import FILTER

        return (("engine_sleep", FILTER),) if any(map(self.wakes_engines, config.clusters.values())) else ()


FEATURE = EngineSleepFeature()
