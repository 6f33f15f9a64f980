"""Counters and histograms of the request path, written by one thread and read at scrape time.

prometheus_client's own take a lock and four Python calls for every increment; a request makes a dozen. Everything here
is counted on the event loop, so an increment is an addition. What is exposed is the same, without `_created`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count up; `amount` is not negative."""
        self.value += amount


class Distribution:
    """One series of a histogram; `counts` has one place a bucket, and the last for what is beyond all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """A bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


S = TypeVar("S")


class _Family(Collector, Generic[S]):
    """The series of one metric by their label values; without label names there is one from the start."""

    def __init__(self, name: str, documentation: str, labelnames: Sequence[str], registry: CollectorRegistry) -> None:
        self.name = name
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._series: dict[tuple[str, ...], S] = {}
        if not self._labelnames:
            self.labels()
        registry.register(self)

    def labels(self, *values: object) -> S:
        """The series of these label values, made on first use; keep it where it is used per request."""
        key = tuple(map(str, values))
        if len(key) != len(self._labelnames):
            raise ValueError(f"{self.name} has the labels {self._labelnames}, not {len(key)}")
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._make()
        return series

    def remove(self, *values: object) -> None:
        """Expose this series no longer. KeyError when there is none."""
        del self._series[tuple(map(str, values))]

    def _make(self) -> S:
        raise NotImplementedError

    def _copied(self) -> Iterable[tuple[tuple[str, ...], S]]:
        """As it stands: a scrape may run in another thread."""
        return list(self._series.items())

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry's check of duplicates."""
        return self._expose(())

    def collect(self) -> Iterable[Metric]:
        """What a scrape shows."""
        return self._expose(self._copied())

    def _expose(self, series: Iterable[tuple[tuple[str, ...], S]]) -> Iterable[Metric]:
        raise NotImplementedError


class Counter(_Family[Tally]):
    """Like prometheus_client's Counter."""

    def __init__(
        self, name: str, documentation: str, labelnames: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        super().__init__(name, documentation, labelnames, registry)

    def inc(self, amount: float = 1.0) -> None:
        """Count up the only series of a counter without labels."""
        self.labels().inc(amount)

    def _make(self) -> Tally:
        return Tally()

    def _expose(self, series: Iterable[tuple[tuple[str, ...], Tally]]) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self._documentation, labels=self._labelnames)
        for values, tally in series:
            family.add_metric(values, tally.value)
        return [family]


class Histogram(_Family[Distribution]):
    """Like prometheus_client's Histogram. `buckets` are upper bounds in rising order, without infinity."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = tuple(buckets)
        super().__init__(name, documentation, labelnames, registry)

    def observe(self, value: float) -> None:
        """Add to the only series of a histogram without labels."""
        self.labels().observe(value)

    def _make(self) -> Distribution:
        return Distribution(self._bounds)

    def _expose(self, series: Iterable[tuple[tuple[str, ...], Distribution]]) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self._documentation, labels=self._labelnames)
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for values, distribution in series:
            rising = accumulate(distribution.counts)
            family.add_metric(values, buckets=list(zip(names, rising, strict=True)), sum_value=distribution.total)
        return [family]
