"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features.warming.settings import WarmingPlace
from kvproxy.operate.feature import Feature, find_filters

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.cache.feature import CacheObserver, CacheParts
    from kvproxy.operate.admin.operated import AdminTarget
    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.config.schema import Config


class WarmingFeature(Feature):
    """Has engines compute prompts before clients send them."""

    name = "warming"
    metric_group = "WarmingMetrics"
    settings = {KvCacheSettings: (WarmingPlace,)}

    def verify(self, config: Config) -> Iterator[Finding]:
        """Refuse automatic warming that routing would not learn of."""
        for at, settings in find_filters(config, KvCacheSettings):
            if _is_on(settings) and not settings.kv_events:
                what = "needs kv_events: by them routing learns what was warmed"
                yield error_at((*at, "warming", "enabled"), what, "or warm by hand: kvproxy warm")

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Return the needs: uses of prefixes, and their tokens, if the proxy warms by itself."""
        return CacheNeeds(uses=_is_on(settings))

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None while the proxy does not warm by itself."""
        from kvproxy.features.warming.warming import Warming

        return Warming(parts) if _is_on(parts.settings) else None

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/warm`."""
        from kvproxy.features.warming.admin import WarmRoutes

        return WarmRoutes(operated, audit).list_routes()


def _is_on(settings: KvCacheSettings) -> bool:
    return settings.enabled and part_of(settings, WarmingPlace).warming.enabled


FEATURE = WarmingFeature()
