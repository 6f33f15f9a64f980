"""Filters of other distributions, by the entry-point group `kvproxy.filters`. A configuration is read without those of
the core, which load all that the proxy is made of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.proxy.filter_settings import filter_models

if TYPE_CHECKING:
    from kvproxy.proxy.filters.chain import FilterType

GROUP = "kvproxy.filters"


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
    shipped = filter_models()
    for entry in installed():
        if wanted is not None and entry.name not in wanted:
            continue
        taken = entry.name in shipped or entry.name in found
        loaded = "its name is taken already" if taken else _load(entry)
        if isinstance(loaded, str):
            source = entry.dist.name if entry.dist else entry.value
            problems.append(Problem("filters", f"filter {entry.name!r} of {source}: {loaded}"))
        else:
            found[entry.name] = loaded
    if problems:
        raise ConfigError(problems)
    return found


def _load(entry: metadata.EntryPoint) -> FilterType | str:
    """Return the filter type an entry point names, or what is wrong with it."""
    from kvproxy.proxy.filters.chain import FilterType  # loads what requests are made of

    try:
        loaded = entry.load()
    except Exception as error:  # noqa: BLE001 - third-party code: any error at import is that filter's problem
        return f"cannot be loaded: {type(error).__name__}: {error}"
    return loaded if isinstance(loaded, FilterType) else f"{entry.value} is not a FilterType"
