"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Model
from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.runtime.operated import AdminTarget


class PrefixExport(StrEnum):
    """Form in which the admin listener lists hot prefixes."""

    OFF = "off"
    HASHES = "hashes"
    TOKENS = "tokens"  # from which the text can be made again


class WarmingSettings(Model):
    """Computing prompts at endpoints that lack them, by `kvproxy warm`."""

    retired = {
        **dict.fromkeys(
            ("enabled", "tokens_per_minute", "uses_per_replica"),
            "a fleet's first tokens took 0.99 of their time with automatic warming; `kvproxy warm` computes prompts",
        ),
        "max_requests": "an engine with more than eight requests is left alone",
    }

    export: PrefixExport = PrefixExport.OFF
    """Content of `GET /warm` for the hot prefixes: token ids, by which `kvproxy warm` computes them again after the
    engines' restart (and from which their text can be read), or hashes alone. Both keep token ids of hot prefixes in
    memory (64 MiB at most)."""


class WarmingPlace(Model):
    """The section that the `kvcache` filter gets."""

    warming: WarmingSettings = WarmingSettings()
    """Prompts computed before they come."""


class WarmingFeature(Feature):
    """Has engines compute prompts before clients send them."""

    name = "warming"
    slow_changes = {"/warm": 300.0}  # a long prompt on a slow engine, twice
    metric_group = "WarmingMetrics"
    settings = {KvCacheSettings: (WarmingPlace,)}

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Return the needs: uses of prefixes, and their tokens, if they are exported."""
        export = part_of(settings, WarmingPlace).warming.export
        return CacheNeeds(uses=settings.enabled and export is not PrefixExport.OFF)

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/warm`."""
        from kvproxy.features.warming.admin import WarmRoutes

        return WarmRoutes(operated, audit).list_routes()


FEATURE = WarmingFeature()
