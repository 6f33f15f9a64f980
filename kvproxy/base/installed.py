"""Features by name: those that ship, and other distributions' of the entry-point group `kvproxy.features`.

Each room has a class of its own with the members that it uses, `BaseFeature` the lowest, and `operate.feature.Feature`
has them all. No room imports a feature. The list is read at first use, once for a process; a feature that cannot be
loaded is named and left out, and the rest works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from importlib import import_module, metadata
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from kvproxy.base.settings.feature_settings import GROUP, PACKAGE, FeatureSettings, load_settings

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup


class BaseFeature:
    """One optional capability. Every member has a default that adds nothing.

    A feature object is light: what runs is imported inside methods, since a running proxy loads every feature,
    whether it is on or off.
    """

    name: ClassVar[str]
    #: Name of its metric group in the module `metrics` beside it; "": it has none.
    metric_group: ClassVar[str] = ""

    @cached_property
    def settings(self) -> FeatureSettings:
        """Its contributions to the configuration, of the module `settings` beside it."""
        return load_settings(self._package)

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Return its groups, which exist from the start, whether the feature is on or off."""
        if not self.metric_group:
            return ()
        return (getattr(import_module(f"{self._package}.metrics"), self.metric_group),)

    @property
    def _package(self) -> str:
        return type(self).__module__.rpartition(".")[0]


log = logging.getLogger("kvproxy")

F = TypeVar("F", bound=BaseFeature)
Load = Callable[[], object]


class Features(NamedTuple):
    """Features that could be loaded, and why others could not, by name."""

    loaded: tuple[BaseFeature, ...]
    failed: Mapping[str, str]


def installed(kind: type[F]) -> Sequence[F]:
    """Every feature that has the members of this kind, in the order of the list."""
    return [feature for feature in all_features().loaded if isinstance(feature, kind)]


@cache
def all_features() -> Features:
    """Load them, once for a process."""
    found = load_features([*_shipped(), *_of_other_distributions()])
    for name, why in found.failed.items():
        log.warning("feature %s is left out: %s", name, why)
    return found


def load_features(sources: Iterable[tuple[str, Load]]) -> Features:
    """Each name with its loader; the first of two with one name counts."""
    loaded: dict[str, BaseFeature] = {}
    failed: dict[str, str] = {}
    for name, load in sources:
        if name in loaded:
            failed[name] = "another feature has its name"
            continue
        try:
            feature = load()
        except Exception as error:  # noqa: BLE001 - whatever its import raises is that feature's problem
            failed[name] = f"cannot be loaded: {type(error).__name__}: {error}"
            continue
        if isinstance(feature, BaseFeature):
            loaded[name] = feature
        else:
            failed[name] = f"{feature!r} is no feature"
    return Features(tuple(loaded.values()), failed)


def _shipped() -> Iterable[tuple[str, Load]]:
    names: Sequence[str] = import_module(PACKAGE).SHIPPED
    return [(name, partial(_load, name)) for name in names]


def _load(name: str) -> object:
    feature: object = import_module(f"{PACKAGE}.{name}.feature").FEATURE
    return feature


def _of_other_distributions() -> Iterable[tuple[str, Load]]:
    return [(entry.name, entry.load) for entry in metadata.entry_points(group=GROUP)]
