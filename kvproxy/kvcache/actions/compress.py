"""Compresses cold prefixes while an instance is busy, remembers them, and undoes it before they are used again."""

from __future__ import annotations

from collections.abc import Sequence

from cachetools import LRUCache

from kvproxy.config.kvcache_schema import CacheStrategySettings
from kvproxy.kvcache.actions.cold import cold_prefixes
from kvproxy.kvcache.actions.hotness import EDGE_PREFIXES, Hotness, KnownPrefix
from kvproxy.kvcache.actions.strategy import Action, PressureOf, Served
from kvproxy.kvcache.providers import ActionKind

#: Compressed prefixes remembered; one that is forgotten is decompressed by nobody, as if the proxy had restarted.
MAX_REMEMBERED = 10_000
#: Message prefixes looked up of one prompt besides its first ones, the longest: earlier turns end in one of them.
MAX_LOOKED_UP = 256


class Compress:
    """`compressed` is what was compressed and not yet decompressed, by instance and prefix key."""

    def __init__(self, settings: CacheStrategySettings, hotness: Hotness) -> None:
        self._settings = settings
        self._hotness = hotness
        self.compressed: LRUCache[tuple[str, int], KnownPrefix] = LRUCache(MAX_REMEMBERED)

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        instance = self._settings.compress_instance_id or served.instance_id
        load = pressure(instance).load
        if load is None or load < self._settings.load_threshold:
            return []
        cold = cold_prefixes(
            self._hotness,
            instance,
            hot_threshold=self._settings.hot_content_threshold,
            taken=taken,
            now=now,
            skip={key for where, key in self.compressed if where == instance},
        )
        taken.update(one.head for one in cold)
        return [Action(ActionKind.COMPRESS, instance, one, f"load {load:.2f}") for one in cold]

    def decompressions(self, keys: Sequence[int], instance: str) -> list[Action]:
        """What must be undone at the instance before a prompt with these message prefixes is served from there."""
        compressed, near = self.compressed, [*keys[:EDGE_PREFIXES], *keys[EDGE_PREFIXES:][-MAX_LOOKED_UP:]]
        found = [compressed[instance, key] for key in near if (instance, key) in compressed]
        return [Action(ActionKind.DECOMPRESS, instance, prefix, "wanted again") for prefix in found]

    def done(self, action: Action, now: float) -> None:
        assert action.prefix is not None
        where = (action.instance_id, action.prefix.key)
        if action.kind is ActionKind.COMPRESS:
            self.compressed[where] = action.prefix
        else:
            self.compressed.pop(where, None)
