"""Settings of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, warning_at
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.operate.config.schema import Config, find_filters


class SnapshotSettings(Model):
    """State of the proxy, kept in a file over a restart: routed prompts, learned speeds and prompt lengths.

    Hashes and numbers, no text and no tokens. Off without a path."""

    retired = {
        "max_age": "a file is used for an hour",
        "interval": "it is written every minute",
        "max_bytes": "a file has 64 MiB at most, without the least recently requested entries",
    }

    path: str = ""
    """File to keep, one for each proxy, in a folder the proxy may write to; empty: no snapshot. It is written every
    minute and at the end."""


class SnapshotPlace(Model):
    """The section that the `kvcache` filter gets."""

    snapshot: SnapshotSettings = SnapshotSettings()
    """Warm restart."""


def find_snapshot(settings: KvCacheSettings) -> SnapshotSettings:
    """Return the section, with its defaults where the filter is off."""
    return part_of(settings, SnapshotPlace).snapshot if settings.enabled else SnapshotSettings()


def verify(config: Config) -> Iterator[Finding]:
    """Doubt a folder that is not there."""
    for at, settings in find_filters(config, KvCacheSettings):
        own = find_snapshot(settings)
        folder = Path(own.path).parent
        if own.path and not folder.is_dir():
            hint = "make it, writable for the proxy"
            yield warning_at((*at, "snapshot", "path"), f"no such folder: {str(folder)!r}", hint)


def share_settings(config: Config, index: int, part: Callable[[int], int]) -> Mapping[str, object]:
    """Leave the file to the first worker, which the others ask for what it restored."""
    if index == 0:
        return {}
    off = {"snapshot": SnapshotSettings()}
    return {
        "filters": tuple(
            spec.model_copy(update={"settings": spec.settings.model_copy(update=off)})
            if isinstance(spec.settings, KvCacheSettings) and find_snapshot(spec.settings).path
            else spec
            for spec in config.filters
        )
    }


SETTINGS = FeatureSettings(fields={KvCacheSettings: (SnapshotPlace,)}, verify=verify, share=share_settings)
