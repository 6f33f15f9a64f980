"""The enabled strategies of one cache service."""

from __future__ import annotations

from kvproxy.cache.actions.strategies import Strategy
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.cache.providers import ActionKind
from kvproxy.features.cache_strategies.strategies import Compress, Evict, Pin, RecordState


class Strategies(CacheObserver):
    """Adds them to what decides after each response: compress, then pin, then evict."""

    def __init__(self, parts: CacheParts) -> None:
        settings = parts.settings.cache_strategy
        actions = parts.actions
        lookups = parts.overlap.lookups
        record = parts.state.of(RecordState).record_at(parts.settings.lmcache_endpoint)
        self._lease_s = settings.pin_lease
        self.pin = Pin(settings, actions.hotness, record, supports=lambda: lookups.supported)
        compress = Compress(settings, actions.cold, record)
        evict = Evict(settings, actions.hotness, actions.cold, record, supports=lambda: lookups.supported)
        enabled: list[tuple[bool, Strategy, tuple[ActionKind, ...]]] = [
            (settings.enable_compression, compress, (ActionKind.COMPRESS, ActionKind.DECOMPRESS)),
            (settings.enable_pinning, self.pin, (ActionKind.PIN, ActionKind.UNPIN)),
            (settings.enable_eviction, evict, (ActionKind.EVICT, ActionKind.CLEAR)),
        ]
        for is_on, strategy, kinds in enabled:
            if is_on:
                actions.strategies.append(strategy)
                actions.adopted |= dict.fromkeys(kinds, strategy.done)

    def describe_pins(self, now: float) -> list[dict[str, object]]:
        """Return the pins that stand, as plain data for people."""
        lasts_s = None if self.pin.counted else self._lease_s
        return [
            {
                "instance": instance,
                "prefix": one.prefix.name,
                "model": one.prefix.model,
                "tokens": one.tokens,
                "age_s": now - one.pinned_at,
                "lapses_in_s": None if lasts_s is None else lasts_s - (now - one.pinned_at),
            }
            for (instance, _), one in self.pin.list_pins(now).items()
        ]
