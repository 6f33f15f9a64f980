"""Filters of the core and of features, by name."""

from __future__ import annotations

from functools import partial

from kvproxy.base.installed import installed
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.proxy.feature import ProxyFeature
from kvproxy.proxy.filter_settings import InferenceRequestSettings, RequestIdSettings, RouterSettings
from kvproxy.proxy.filters import inference_request, kvcache, request_id, router
from kvproxy.proxy.filters.chain import FilterType

FILTERS: dict[str, FilterType] = {
    "inference_request": FilterType(InferenceRequestSettings, inference_request.build),
    "kvcache": FilterType(KvCacheSettings, kvcache.build),
    "request_id": FilterType(RequestIdSettings, request_id.build),
    "router": FilterType(RouterSettings, router.build, terminal=True),
}


def list_filters() -> dict[str, FilterType]:
    """Return the filters of the core and of installed features, by name."""
    return {
        **{
            name: FilterType(added.settings, partial(feature.build_filter, name))
            for feature in installed(ProxyFeature)
            for name, added in feature.settings.filters.items()
        },
        **FILTERS,
    }
