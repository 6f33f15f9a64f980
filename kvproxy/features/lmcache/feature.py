"""The feature, as the core meets it. Its settings stand among those of the kvcache filter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvproxy.base.settings.compose import part_of
from kvproxy.cache.feature import CacheNeeds
from kvproxy.cluster.feature import SourceTexts
from kvproxy.features.lmcache.provider import CONTROLLER, COORDINATOR
from kvproxy.features.lmcache.settings import LMCacheSettings, has_store, strategy_of
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    import httpx
    from starlette.routing import Route

    from kvproxy.cache.feature import CacheObserver, CacheParts, View
    from kvproxy.cache.settings import KvCacheSettings
    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.runtime.operated import AdminTarget


_FIX = (
    "likely the engine does not load from LMCache, or instance_id names another engine: check its kv-transfer-config "
    "and `kvproxy doctor`"
)


class LMCache(Feature):
    """Looks prompts up at LMCache, and pins, compresses and evicts prefixes there."""

    name = "lmcache"
    metric_group = "LMCacheMetrics"
    fact_sources: ClassVar = {
        CONTROLLER: SourceTexts("LMCache's lookup", _FIX),
        COORDINATOR: SourceTexts("LMCache's directory", _FIX),
    }

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Facts and tokens for lookups, and uses for strategies."""
        is_on = has_store(settings)
        return CacheNeeds(facts=is_on, uses=is_on and bool(strategy_of(settings).enabled))

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """Return the observer that brings the store; None without a service."""
        if not has_store(parts.settings):
            return None
        from kvproxy.features.lmcache.observer import LMCacheObserver

        return LMCacheObserver(parts)

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        """Return the pins that stand, and the counts of lookups and actions."""
        if observer is None:  # nothing of it is loaded
            return {"lookups": {}, "actions": {}, "switched_off": []} if view == "status" else {}
        from kvproxy.features.lmcache.observer import LMCacheObserver

        assert isinstance(observer, LMCacheObserver)
        if view == "status":
            return observer.describe_status()
        strategies = observer.store.strategies
        return {"leases": strategies.describe_pins(now)} if view == "pins" and strategies is not None else {}

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Iterable[Check]:
        """Return the checks of the service, its instances and its lookups."""
        if deployment.kvcache is None or not deployment.looks_up:
            return ()
        from kvproxy.features.lmcache.doctor import list_checks
        from kvproxy.features.lmcache.service_facts import LmcacheFacts

        return list_checks(
            LmcacheFacts(part_of(deployment.kvcache, LMCacheSettings), tools=deployment.tools), deployment, trial=trial
        )

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        from kvproxy.operate.capabilities import NO_FILTER
        from kvproxy.operate.config.schema import find_kvcache_settings

        kvcache = find_kvcache_settings(config)
        if kvcache is None:
            return (Capability("LMCache", OFF, NO_FILTER),)
        is_on = has_store(kvcache)
        return (Capability("LMCache", *((ON, "`lmcache_endpoint`") if is_on else (OFF, "no `lmcache_endpoint`"))),)

    async def find_store_kind(self, http: httpx.AsyncClient, url: str) -> str:
        """Return `controller` or `coordinator`."""
        from kvproxy.features.lmcache.doctor import find_kind

        return await find_kind(http, url)

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/cache/priorities`."""
        from kvproxy.features.lmcache.admin import PriorityRoutes

        return PriorityRoutes(operated, audit).list_routes()


FEATURE = LMCache()
