"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features.warming.settings import PrefixExport, WarmingPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.runtime.operated import AdminTarget


class WarmingFeature(Feature):
    """Has engines compute prompts before clients send them."""

    name = "warming"
    slow_changes = {"/warm": 300.0}  # a long prompt on a slow engine, twice
    metric_group = "WarmingMetrics"

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Return the needs: uses of prefixes, and their tokens, if they are exported."""
        export = part_of(settings, WarmingPlace).warming.export
        return CacheNeeds(uses=settings.enabled and export is not PrefixExport.OFF)

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/warm`."""
        from kvproxy.features.warming.admin import WarmRoutes

        return WarmRoutes(operated, audit).list_routes()


FEATURE = WarmingFeature()
