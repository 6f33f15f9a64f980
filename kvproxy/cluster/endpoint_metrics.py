"""The metric series of one endpoint, made when first used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvproxy.base.metrics.collectors import Counter, CounterCell, Gauge, Histogram, HistogramCell
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cluster.metrics import EndpointRequestMetrics, EndpointStateMetrics

#: Models counted one by one on one endpoint; further ones are counted together.
MAX_MODELS = 16
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Latency:
    """How long the requests of one model took on one endpoint."""

    ttft: HistogramCell  # of streamed answers
    whole: HistogramCell  # the same for other answers, whose first byte is their end
    itl: HistogramCell
    duration: HistogramCell


class EndpointMetrics:
    """Series of one endpoint, made when first used, so that no request pays for a look-up of labels.

    After `close` they are gone from the exposition; late observations go nowhere.
    """

    def __init__(self, metrics: Metrics, cluster: str, endpoint: EndpointId) -> None:
        self._metrics = metrics
        self.cluster = cluster
        self._labels = (cluster, str(endpoint))
        self._children: dict[tuple[Counter, str], CounterCell] = {}
        self._answers: dict[int, CounterCell] = {}  # of `requests`, by status: the counter that every request needs
        self._latencies: dict[str, Latency] = {}
        self._series: set[tuple[Counter | Gauge | Histogram, tuple[str, ...]]] = set()
        self.closed = False  # its series are removed
        self.last_failure = ""  # reason of the last failed attempt; "": none failed yet
        self.last_probe = ""  # outcome of the last probe

    def count_request(self, status: int) -> None:
        """Count a request by the status of its response."""
        tally = self._answers.get(status)
        if tally is None:
            tally = self._tally(self._metrics.group(EndpointRequestMetrics).finished, str(status))
            if tally is None:
                return
            self._answers[status] = tally
        tally.value += 1.0

    def find_latency(self, model: str) -> Latency | None:
        """Histograms of this model's requests here; None once closed. `model` is from a closed set."""
        latency = self._latencies.get(model)
        if latency is not None or self.closed:
            return latency
        if len(self._latencies) >= MAX_MODELS and model != OTHER:
            return self.find_latency(OTHER)
        group = self._metrics.group(EndpointRequestMetrics)
        labels = (*self._labels, model)
        streamed = (*labels, "true")
        whole = (*labels, "false")
        series = [(group.ttft, streamed), (group.ttft, whole), (group.itl, labels), (group.duration, labels)]
        self._series.update(series)
        latency = self._latencies[model] = Latency(*(family.labels(*values) for family, values in series))
        return latency

    def attempt_failure(self, reason: str) -> None:
        """Count a failed attempt; `reason` as UpstreamError names it."""
        self.last_failure = reason
        self.count(self._metrics.group(EndpointRequestMetrics).attempt_failures, reason)

    def count_ejection(self, reason: str) -> None:
        self.count(self._metrics.group(EndpointStateMetrics).ejections, reason)

    def count_probe(self, outcome: str) -> None:
        """Count an active probe."""
        self.last_probe = outcome
        self.count(self._metrics.group(EndpointStateMetrics).probes, outcome)

    def rank_refused(self, refusal: str) -> None:
        """Count a rank number that the engine refused; `refusal` is the reaction."""
        self.count(self._metrics.group(EndpointStateMetrics).rank_refusals, refusal)

    def count(self, counter: Counter, label: str) -> None:
        """Count in a series of this endpoint with one label more; nothing once closed."""
        tally = self._tally(counter, label)
        if tally is not None:
            tally.inc()

    def bind_gauge(self, gauge: Gauge, read: Callable[[], float], *labels: str) -> None:
        """Read a gauge of this endpoint at scrape time; `labels` where they are not cluster and endpoint."""
        values = labels or self._labels
        gauge.labels(*values).set_function(read)
        self._series.add((gauge, values))

    def close(self) -> None:
        """Remove every series of this endpoint. Idempotent."""
        self.closed = True
        for metric, values in self._series:
            metric.remove(*values)
        self._series.clear()
        self._children.clear()
        self._answers.clear()
        self._latencies.clear()

    def _tally(self, counter: Counter, label: str) -> CounterCell | None:
        """Return the series, made when there is none yet; None once closed."""
        child = self._children.get((counter, label))
        if child is None and not self.closed:
            values = (*self._labels, label)
            child = self._children[(counter, label)] = counter.labels(*values)
            self._series.add((counter, values))
        return child
