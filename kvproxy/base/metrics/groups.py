"""Metrics in groups: each room and each feature declares its own; one `Metrics` has those that are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter, Gauge, Histogram
from kvproxy.base.metrics.exposition import Registry

G = TypeVar("G", bound="MetricGroup")


class Declared(NamedTuple):
    """A metric of a group before there is a registry, which `make` takes by keyword."""

    name: str
    make: Callable[..., object]
    across: Across = Across.SUM


def counter(name: str, documentation: str, labels: str = "") -> Counter:
    """Declare a counter; `labels` are names with spaces between them, as of all kinds."""
    return cast("Counter", Declared(name, partial(Counter, name, documentation, labels.split())))


def histogram(name: str, documentation: str, labels: str = "", *, buckets: Sequence[float]) -> Histogram:
    """Declare a histogram; `buckets` as in Histogram."""
    make = partial(Histogram, name, documentation, labels.split(), buckets=buckets)
    return cast("Histogram", Declared(name, make))


def gauge(name: str, documentation: str, labels: str = "", *, across: Across = Across.SUM) -> Gauge:
    """Declare a gauge that is set or read series by series; `across` is how those of several workers are merged."""
    return cast("Gauge", Declared(name, partial(Gauge, name, documentation, labels.split()), across))


def callback_gauge(
    name: str, documentation: str, labels: str = "", *, counts: bool = False, across: Across = Across.SUM
) -> CallbackGauge:
    """Declare a gauge that is read; `counts` as in CallbackGauge."""
    make = partial(CallbackGauge, name, documentation, labels.split(), counts=counts)
    return cast("CallbackGauge", Declared(name, make, across))


class MetricGroup:
    """Metrics of one subject, each declared as an attribute of the class and made with the group. Labels come from
    closed or bounded sets. The docstring is their heading in docs/metrics.md."""

    #: Contents of labels, beside what other groups have in them.
    labels: ClassVar[Mapping[str, str]] = {}

    def __init__(self, registry: CollectorRegistry) -> None:
        for attribute, declared in self.list_declared():
            setattr(self, attribute, declared.make(registry=registry))

    @classmethod
    def list_declared(cls) -> Iterator[tuple[str, Declared]]:
        """Yield each metric by its attribute, in the order of the class."""
        for attribute, declared in vars(cls).items():
            if isinstance(declared, Declared):
                yield attribute, declared


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
