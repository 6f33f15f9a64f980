"""Gauges and counters read at the scrape, for things that come and go: nothing kept, so nothing to be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvproxy.metrics.exposition import head, label_text

#: The series there are now: label values and value. Runs in the thread of the scrape.
Source = Callable[[], Iterable[tuple[tuple[str, ...], float]]]


class Reading(Collector):
    """A gauge with one source (with `counts` a counter); without any it shows no series."""

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
        registry.register(self)

    def read(self, source: Source) -> None:
        """Ask `source` from now on, and no earlier one."""
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry's check of duplicates."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """What a scrape shows."""
        family = self._family()
        for labels, value in self._source():
            family.add_metric(labels, value)
        return [family]

    def texts(self) -> Iterator[str]:
        """The same as text, in one piece: what is read may change at any pause."""
        name, kind = (f"{self.name}_total", "counter") if self._counts else (self.name, "gauge")
        lines = (f"{name}{self._labels(labels)} {value!r}\n" for labels, value in self._source())
        yield head(name, kind, self._documentation) + "".join(lines)

    def _labels(self, values: tuple[str, ...]) -> str:
        return f"{{{label_text(self._labelnames, values)}}}" if values else ""

    def _family(self) -> GaugeMetricFamily | CounterMetricFamily:
        kind = CounterMetricFamily if self._counts else GaugeMetricFamily
        return kind(self.name, self._documentation, labels=self._labelnames)
