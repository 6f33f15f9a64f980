"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Model, Size
from kvproxy.base.settings.paths import Finding, warning_at
from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.operate.config.schema import find_filters
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts, View
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.runtime.operated import AdminTarget


#: An older file is not used: the engines have evicted much of its contents.
MAX_AGE_S = 3600.0


class SnapshotSettings(Model):
    """State of the proxy, kept in a file over a restart: routed prompts, learned speeds and prompt lengths.

    Hashes and numbers, no text and no tokens. Off without a path."""

    retired = {"max_age": "a file is used for an hour", "interval": "it is written every minute"}

    path: str = ""
    """File to keep, one for each proxy, in a folder the proxy may write to; empty: no snapshot. It is written every
    minute and at the end."""
    max_bytes: Size = Field(default=64 * 1024 * 1024, ge=4096)
    """Largest file (a little over 8 bytes for each 256 bytes of prompt); the least recently requested entries are left
    out."""


class SnapshotPlace(Model):
    """The section that the `kvcache` filter gets."""

    snapshot: SnapshotSettings = SnapshotSettings()
    """Warm restart."""


_GAIN = "`snapshot.path` of the kvcache filter keeps what is known of engines over a restart"


class Snapshot(Feature):
    """Snapshot feature: keeps learned state over a restart."""

    name = "snapshot"
    metric_group = "SnapshotMetrics"
    settings = {KvCacheSettings: (SnapshotPlace,)}

    def verify(self, config: Config) -> Iterator[Finding]:
        """Doubt a folder that is not there."""
        for at, settings in find_filters(config, KvCacheSettings):
            own = _own(settings)
            folder = Path(own.path).parent
            if own.path and not folder.is_dir():
                hint = "make it, writable for the proxy"
                yield warning_at((*at, "snapshot", "path"), f"no such folder: {str(folder)!r}", hint)

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Facts: they fill the index that is kept."""
        return CacheNeeds(facts=bool(_own(settings).path))

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None without a path."""
        from kvproxy.features.snapshot.restart import warm_restart

        settings = _own(parts.settings)
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
        path = any(_own(one).path for one in found)
        reason = "`snapshot.path`" if path else "no `snapshot.path`"
        return (Capability("snapshot", ON if path else OFF, reason, gain=_GAIN),)

    def merge_rules(self) -> Mapping[str, Mapping[str, Rule]]:
        """Return the state of the file as the worker shows it that keeps one."""
        from kvproxy.operate.merge import pick

        return {"/cache/status": {"snapshot": pick(lambda one: one["age_s"] is not None)}}

    def share_settings(self, config: Config, index: int, part: Callable[[int], int]) -> Mapping[str, object]:
        """Leave the file to the first worker, which the others ask for what it restored."""
        if index == 0:
            return {}
        off = {"snapshot": SnapshotSettings()}
        return {
            "filters": tuple(
                spec.model_copy(update={"settings": spec.settings.model_copy(update=off)})
                if isinstance(spec.settings, KvCacheSettings) and _own(spec.settings).path
                else spec
                for spec in config.filters
            )
        }


def _own(settings: KvCacheSettings) -> SnapshotSettings:
    return part_of(settings, SnapshotPlace).snapshot if settings.enabled else SnapshotSettings()


FEATURE = Snapshot()
