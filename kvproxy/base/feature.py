"""Features, as far as the lowest room meets them: one optional capability each, by what it adds to the core.

Each room has a class of its own with the members that it uses, and `operate.feature.Feature` has them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup
    from kvproxy.base.settings.model import Model


class BaseFeature:
    """One optional capability. Every member has a default that adds nothing.

    A feature object is light: its module imports models of settings, and what runs is imported inside methods, since
    every command loads every feature.
    """

    name: ClassVar[str]
    #: Models of the core, and models whose fields each of them gets: sections and settings, read by `part_of`.
    settings: ClassVar[Mapping[type[Model], Sequence[type[Model]]]] = {}

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Group that exist from the start, whether the feature is on or off."""
        return ()
