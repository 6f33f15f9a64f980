"""Kinds of metric: counters, gauges and histograms written on the event loop, and gauges read at the scrape.

prometheus_client's own take a lock and four Python calls for every increment; a request makes a dozen. Everything here
is counted on the event loop, so an increment is an addition. The exposed page is the same, without `_created`, and is
written from texts that are kept with the series."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvproxy.base.metrics.exposition import family_head, label_text


class CounterCell:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count up; `amount` is not negative."""
        self.value += amount


class GaugeCell:
    """One series of a gauge: a value that is set, or one that is read when it is shown."""

    __slots__ = ("_read", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._read: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        """Value to show now."""
        return self._value if self._read is None else float(self._read())

    def set(self, value: float) -> None:
        """Show this value from now on."""
        self._read = None
        self._value = float(value)

    def set_function(self, read: Callable[[], float]) -> None:
        """Show what `read` returns at each scrape from now on."""
        self._read = read


class HistogramCell:
    """One series of a histogram; `counts` has one place a bucket, and the last for what is beyond all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


#: The current series: label values and value. Runs in the scrape's thread.
Source = Callable[[], Iterable[tuple[tuple[str, ...], float]]]

S = TypeVar("S")


class _Family(Collector, Generic[S]):
    """The series of one metric by their label values; without label names there is one from the start."""

    kind: str

    def __init__(
        self, name: str, documentation: str, labelnames: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self.name = name
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._series: dict[tuple[str, ...], S] = {}
        # parts of a series' text, made by the first scrape that shows it
        self._templates: dict[tuple[str, ...], str] = {}
        if not self._labelnames:
            self.labels()
        registry.register(self)

    def labels(self, *values: object) -> S:
        """Return the series of these label values, made on first use; keep it where it is used per request."""
        key = tuple(map(str, values))
        if len(key) != len(self._labelnames):
            raise ValueError(f"{self.name} has the labels {self._labelnames}, not {len(key)}")
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._make()
        return series

    def remove(self, *values: object) -> None:
        """Expose this series no longer. KeyError when there is none."""
        key = tuple(map(str, values))
        del self._series[key]
        self._templates.pop(key, None)

    def _make(self) -> S:
        raise NotImplementedError

    def _copied(self) -> Iterable[tuple[tuple[str, ...], S]]:
        """As it stands: a scrape may run in another thread."""
        return list(self._series.items())

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry's check of duplicates."""
        return self._expose(())

    def collect(self) -> Iterable[Metric]:
        """Return what a scrape shows."""
        return self._expose(self._copied())

    def texts(self) -> Iterator[str]:
        """Yield the same as text, series by series."""
        yield family_head(self._shown_name(), self.kind, self._documentation)
        for key in list(self._series):
            series = self._series.get(key)
            if series is None:  # removed while the scrape was paused
                continue
            template = self._templates.get(key)
            if template is None:
                template = self._templates[key] = self._template(label_text(self._labelnames, key).replace("%", "%%"))
            yield template % self._values(series)

    def _expose(self, series: Iterable[tuple[tuple[str, ...], S]]) -> Iterable[Metric]:
        raise NotImplementedError

    def _shown_name(self) -> str:
        return self.name

    def _template(self, labels: str) -> str:
        """Text of a series with places for `_values`."""
        raise NotImplementedError

    def _values(self, series: S) -> tuple[float, ...]:
        raise NotImplementedError


class Counter(_Family[CounterCell]):
    """Like prometheus_client's Counter."""

    kind = "counter"

    def inc(self, amount: float = 1.0) -> None:
        """Count up the only series of a counter without labels."""
        self.labels().inc(amount)

    def total(self) -> float:
        """Return the value over all labels."""
        return sum(cell.value for cell in self._series.values())

    def sum_by(self, label: str) -> dict[str, float]:
        """Return the value by one label, added up over the others."""
        place = self._labelnames.index(label)
        found: dict[str, float] = {}
        for values, cell in self._series.items():
            found[values[place]] = found.get(values[place], 0.0) + cell.value
        return found

    def list_values(self) -> list[tuple[tuple[str, ...], float]]:
        """Return every series by its label values."""
        return [(values, cell.value) for values, cell in self._series.items()]

    def _make(self) -> CounterCell:
        return CounterCell()

    def _expose(self, series: Iterable[tuple[tuple[str, ...], CounterCell]]) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self._documentation, labels=self._labelnames)
        for values, tally in series:
            family.add_metric(values, tally.value)
        return [family]

    def _shown_name(self) -> str:
        return f"{self.name}_total"

    def _template(self, labels: str) -> str:
        braced = f"{{{labels}}}" if labels else ""
        return f"{self._shown_name()}{braced} %r\n"

    def _values(self, series: CounterCell) -> tuple[float, ...]:
        return (series.value,)


class Gauge(_Family[GaugeCell]):
    """Like prometheus_client's Gauge."""

    kind = "gauge"

    def set(self, value: float) -> None:
        """Set the only series of a gauge without labels."""
        self.labels().set(value)

    def set_function(self, read: Callable[[], float]) -> None:
        """Read the only series of a gauge without labels at each scrape."""
        self.labels().set_function(read)

    def _make(self) -> GaugeCell:
        return GaugeCell()

    def _expose(self, series: Iterable[tuple[tuple[str, ...], GaugeCell]]) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self._documentation, labels=self._labelnames)
        for values, cell in series:
            family.add_metric(values, cell.value)
        return [family]

    def _template(self, labels: str) -> str:
        return f"{self.name}{{{labels}}} %r\n" if labels else f"{self.name} %r\n"

    def _values(self, series: GaugeCell) -> tuple[float, ...]:
        return (series.value,)


class Histogram(_Family[HistogramCell]):
    """Like prometheus_client's Histogram. `buckets` are upper bounds in rising order, without infinity."""

    kind = "histogram"

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
        self._bound_names = [floatToGoString(bound) for bound in (*buckets, float("inf"))]  # type: ignore[no-untyped-call]
        super().__init__(name, documentation, labelnames, registry=registry)

    def observe(self, value: float) -> None:
        """Add to the only series of a histogram without labels."""
        self.labels().observe(value)

    def _make(self) -> HistogramCell:
        return HistogramCell(self._bounds)

    def _expose(self, series: Iterable[tuple[tuple[str, ...], HistogramCell]]) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self._documentation, labels=self._labelnames)
        for values, distribution in series:
            buckets = list(zip(self._bound_names, accumulate(distribution.counts), strict=True))
            family.add_metric(values, buckets=buckets, sum_value=distribution.total)
        return [family]

    def _template(self, labels: str) -> str:
        before, braced = (f"{labels},", f"{{{labels}}}") if labels else ("", "")
        buckets = "".join(f'{self.name}_bucket{{{before}le="{bound}"}} %d\n' for bound in self._bound_names)
        return f"{buckets}{self.name}_count{braced} %d\n{self.name}_sum{braced} %r\n"

    def _values(self, series: HistogramCell) -> tuple[float, ...]:
        rising = (*accumulate(series.counts),)
        return (*rising, rising[-1], series.total)


class CallbackGauge(Collector):
    """A gauge with one source (with `counts` a counter), for things that come and go: nothing is kept, so nothing is
    removed. Without a source it shows no series."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        counts: bool = False,
        registry: CollectorRegistry,
    ) -> None:
        self.name = name
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._counts = counts
        self._source: Source = tuple
        self._label_texts: dict[tuple[str, ...], str] = {}  # of the series that the last scrape showed
        registry.register(self)

    def set_source(self, source: Source) -> None:
        """Ask `source` from now on, and no earlier one."""
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry's check of duplicates."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """Return what a scrape shows."""
        family = self._family()
        for labels, value in self._source():
            family.add_metric(labels, value)
        return [family]

    def texts(self) -> Iterator[str]:
        """Yield the same as text, series by series. The source is read in one piece: it may change at any pause."""
        name, kind = (f"{self.name}_total", "counter") if self._counts else (self.name, "gauge")
        known = self._label_texts
        self._label_texts = shown = {}
        series = list(self._source())
        yield family_head(name, kind, self._documentation)
        for values, value in series:
            text = shown[values] = known.get(values) or self._labels(values)
            yield f"{name}{text} {value!r}\n"

    def _labels(self, values: tuple[str, ...]) -> str:
        return f"{{{label_text(self._labelnames, values)}}}" if values else ""

    def _family(self) -> GaugeMetricFamily | CounterMetricFamily:
        kind = CounterMetricFamily if self._counts else GaugeMetricFamily
        return kind(self.name, self._documentation, labels=self._labelnames)
