"""Every filter by name: the core's, those of features, and other distributions' of the entry-point group
`kvproxy.filters`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from importlib import metadata

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.installed import installed
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.proxy.feature import ProxyFeature
from kvproxy.proxy.filter_settings import (
    InferenceRequestSettings,
    RequestIdSettings,
    RouterSettings,
)
from kvproxy.proxy.filters import inference_request, kvcache, request_id, router
from kvproxy.proxy.filters.chain import FilterType

GROUP = "kvproxy.filters"


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
            name: FilterType(kind, partial(feature.build_filter, name))
            for feature in installed(ProxyFeature)
            for name, kind in feature.filters.items()
        },
        **FILTERS,
    }


def _installed() -> Iterable[metadata.EntryPoint]:
    return _entry_points(tuple(sys.path))


@cache
def _entry_points(_path: tuple[str, ...]) -> Iterable[metadata.EntryPoint]:
    """Read the metadata of every distribution on the path: 12 ms, which no reload has to spend again."""
    return metadata.entry_points(group=GROUP)


def discover(
    wanted: Collection[str] | None = None, *, installed: Callable[[], Iterable[metadata.EntryPoint]] = _installed
) -> dict[str, FilterType]:
    """Other distributions' filters by name; with `wanted`, only those are imported, so that an unused one does no harm.

    Raises ConfigError that names the distribution of every filter that cannot be loaded, is not a FilterType, or
    takes a name that is taken.
    """
    found: dict[str, FilterType] = {}
    problems: list[Problem] = []
    shipped = list_filters()
    for entry in installed():
        if wanted is not None and entry.name not in wanted:
            continue
        taken = entry.name in shipped or entry.name in found
        loaded = "its name is taken already" if taken else _load(entry)
        if isinstance(loaded, FilterType):
            found[entry.name] = loaded
        else:
            source = entry.dist.name if entry.dist else entry.value
            problems.append(Problem("filters", f"filter {entry.name!r} of {source}: {loaded}"))
    if problems:
        raise ConfigError(problems)
    return found


def _load(entry: metadata.EntryPoint) -> FilterType | str:
    """Return the filter type an entry point names, or what is wrong with it."""
    try:
        loaded = entry.load()
    except Exception as error:  # noqa: BLE001 - third-party code: any error at import is that filter's problem
        return f"cannot be loaded: {type(error).__name__}: {error}"
    return loaded if isinstance(loaded, FilterType) else f"{entry.value} is not a FilterType"
