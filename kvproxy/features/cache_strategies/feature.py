"""The feature, as the core meets it. Its settings stand among those of all actions at LMCache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts, View


class CacheStrategies(Feature):
    """Pins hot prefixes at LMCache, compresses cold ones under load, and evicts them while memory is short."""

    name = "cache_strategies"

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """Return the strategies, where one is enabled."""
        if not parts.settings.cache_strategy.enabled:
            return None
        from kvproxy.features.cache_strategies.observer import Strategies

        return Strategies(parts)

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        """Return the pins that stand."""
        from kvproxy.features.cache_strategies.observer import Strategies

        return {"leases": observer.describe_pins(now)} if view == "pins" and isinstance(observer, Strategies) else {}


FEATURE = CacheStrategies()
