"""The feature, as the core meets it. Its settings stand among those of the kvcache filter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvproxy.cache.feature import CacheNeeds
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    import httpx
    from starlette.routing import Route

    from kvproxy.cache.feature import CacheObserver, CacheParts, View
    from kvproxy.cache.settings import KvCacheSettings
    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.runtime.operated import AdminTarget


class LMCache(Feature):
    """Looks prompts up at LMCache, and pins, compresses and evicts prefixes there."""

    name = "lmcache"

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Facts and tokens for lookups, and uses for strategies."""
        is_on = bool(settings.lmcache_endpoint)
        return CacheNeeds(facts=is_on, uses=is_on and bool(settings.cache_strategy.enabled), lookups=is_on)

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """Return the observer that brings the store; None without a service."""
        if not parts.settings.lmcache_endpoint:
            return None
        from kvproxy.features.lmcache.observer import LMCacheObserver

        return LMCacheObserver(parts)

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        """Return the pins that stand, and the counts of lookups and actions."""
        from kvproxy.features.lmcache.observer import LMCacheObserver

        own = observer if isinstance(observer, LMCacheObserver) else None
        if view == "status":
            return {"lookups": {}, "actions": {}, "switched_off": []} if own is None else own.describe_status()
        strategies = None if own is None else own.store.strategies
        return {"leases": strategies.describe_pins(now)} if view == "pins" and strategies is not None else {}

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Iterable[Check]:
        """Return the checks of the service, its instances and its lookups."""
        if deployment.kvcache is None or not deployment.looks_up:
            return ()
        from kvproxy.features.lmcache.doctor import list_checks
        from kvproxy.features.lmcache.service_facts import LmcacheFacts

        return list_checks(LmcacheFacts(deployment.kvcache, tools=deployment.tools), deployment, trial=trial)

    async def find_store_kind(self, http: httpx.AsyncClient, url: str) -> str:
        """Return `controller` or `coordinator`."""
        from kvproxy.features.lmcache.doctor import find_kind

        return await find_kind(http, url)

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/cache/priorities`."""
        from kvproxy.features.lmcache.admin import PriorityRoutes

        return PriorityRoutes(operated, audit).list_routes()


FEATURE = LMCache()
