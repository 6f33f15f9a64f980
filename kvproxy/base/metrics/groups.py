"""Metrics in groups: each room and each feature declares its own; one `Metrics` has those that are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar, cast

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.exposition import Registry

G = TypeVar("G", bound="MetricGroup")


class MetricGroup:
    """Metrics of one subject. Its docstring is their heading in docs/metrics.md."""

    #: How gauges of several workers are merged, by name; others are summed.
    across: ClassVar[Mapping[str, Across]] = {}
    #: Contents of labels, beside what other groups have in them.
    labels: ClassVar[Mapping[str, str]] = {}

    def __init__(self, r: CollectorRegistry) -> None:
        """Declare each metric as an attribute. Labels come from closed or bounded sets."""


class Metrics:
    """Groups bound to one registry (a fresh one unless given). Components keep the metric, or the series, they use."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = Registry() if registry is None else registry
        self._groups: dict[type[MetricGroup], MetricGroup] = {}

    def group(self, kind: type[G]) -> G:
        """Return the group of this kind, made on first use."""
        found = self._groups.get(kind)
        if found is None:
            found = self._groups[kind] = kind(self.registry)
        return cast("G", found)
