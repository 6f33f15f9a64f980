"""Settings that features add to the configuration, and the packages of the features that are installed.

Reading a file loads the module `settings` of each package and no feature: it has the models, and `SETTINGS`, which
gives each its place. The feature, and what runs, import their settings from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvproxy.base.errors import Problem, Severity
    from kvproxy.base.settings.model import Model
    from kvproxy.base.settings.paths import Finding

log = logging.getLogger("kvproxy")

GROUP = "kvproxy.features"
PACKAGE = "kvproxy.features"


class AddedFilter(NamedTuple):
    """A filter's settings, and its place in a chain that is not written out: right before a filter of the core, after
    those of features earlier in the list."""

    settings: type[Model]
    before: str = ""  # empty: where third-party filters stand
    default: bool = False  # in the chain if the configuration does not name it


class FilterOrder(NamedTuple):
    """Two filters, and why the other order is wrong (`error`) or doubtful."""

    early: str
    late: str
    why: str
    severity: Severity = "warning"


class Dialect(NamedTuple):
    """Another form of configuration files."""

    #: Whether a file is in it.
    recognizes: Callable[[Mapping[str, Any]], bool]
    #: Returns the configuration, and every problem, `known` ones among them. Takes `extra_filters`, `lenient`, `known`.
    decode: Callable[..., tuple[Any, list[Problem]]]


def _never(settings: Any) -> bool:
    return False


def _nothing(config: Any) -> tuple[()]:
    return ()


def _keep_whole(config: Any, index: int, part: Callable[[int], int]) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSettings:
    """Contributions of one feature to the configuration. Functions get the whole `Config`."""

    #: Models of the core, and models whose fields each of them gets: sections and settings, read by `part_of`.
    fields: Mapping[type[Model], Sequence[type[Model]]] = field(default_factory=dict)
    filters: Mapping[str, AddedFilter] = field(default_factory=dict)
    filter_order: Sequence[FilterOrder] = ()
    #: Whether settings of the kvcache filter name a store beside the engines that it brings.
    has_store: Callable[[Any], bool] = _never
    #: Its keys of the top level that are read at the start only: a reload names those that changed.
    read_at_start: Sequence[str] = ()
    #: Faults and doubts about its settings beside the rest of the configuration.
    verify: Callable[[Any], Iterable[Finding]] = _nothing
    #: Certificate files that it shows, by their places, for `kvproxy doctor`.
    list_certificates: Callable[[Any], Iterable[tuple[str, str]]] = _nothing
    #: Keys of the top level as process `index` of several gets them: bounds in parts, files of its own.
    share: Callable[[Any, int, Callable[[int], int]], Mapping[str, object]] = _keep_whole
    dialect: Dialect | None = None


def list_packages() -> Mapping[str, str]:
    """Return the packages of features by name, of which none is loaded; the first of two with one name counts."""
    packages = {name: f"{PACKAGE}.{name}" for name in import_module(PACKAGE).SHIPPED}
    for entry in metadata.entry_points(group=GROUP):
        if entry.module.endswith(".feature"):
            packages.setdefault(entry.name, entry.module.removesuffix(".feature"))
    return packages


def load_settings(package: str) -> FeatureSettings:
    """Return the contributions of a package, which may have none."""
    if find_spec(module := f"{package}.settings") is None:
        return FeatureSettings()
    found: FeatureSettings = import_module(module).SETTINGS
    return found


@cache
def settings_of_features() -> Sequence[FeatureSettings]:
    """Load them, once for a process, in the order of the list; those that cannot be loaded are named and left out."""
    found = []
    for name, package in list_packages().items():
        try:
            found.append(load_settings(package))
        except Exception as error:  # noqa: BLE001 - whatever its import raises is that feature's problem
            log.warning("settings of feature %s are left out: %s: %s", name, type(error).__name__, error)
    return found
