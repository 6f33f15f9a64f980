"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features.snapshot.settings import find_snapshot
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts, View
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.runtime.operated import AdminTarget


_GAIN = "`snapshot.path` of the kvcache filter keeps what is known of engines over a restart"


class Snapshot(Feature):
    """Snapshot feature: keeps learned state over a restart."""

    name = "snapshot"
    metric_group = "SnapshotMetrics"

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Facts: they fill the index that is kept."""
        return CacheNeeds(facts=bool(find_snapshot(settings).path))

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None without a path."""
        from kvproxy.features.snapshot.restart import warm_restart

        settings = find_snapshot(parts.settings)
        return warm_restart(settings, parts) if settings.path else None

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        """Return the state of the file; None without a path."""
        if view != "status":
            return {}
        from kvproxy.features.snapshot.restart import WarmRestart

        return {"snapshot": observer.status() if isinstance(observer, WarmRestart) else None}

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return whether there is a path."""
        found = [spec.settings for spec in config.filters if isinstance(spec.settings, KvCacheSettings)]
        if not any(one.enabled for one in found):
            return (Capability("snapshot", OFF, "the kvcache filter is not in use"),)
        path = any(find_snapshot(one).path for one in found)
        reason = "`snapshot.path`" if path else "no `snapshot.path`"
        return (Capability("snapshot", ON if path else OFF, reason, gain=_GAIN),)

    def merge_rules(self) -> Mapping[str, Mapping[str, Rule]]:
        """Return the state of the file as the worker shows it that keeps one."""
        from kvproxy.operate.merge import pick

        return {"/cache/status": {"snapshot": pick(lambda one: one["age_s"] is not None)}}


FEATURE = Snapshot()
