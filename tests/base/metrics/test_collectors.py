"""Our counters and histograms, held against prometheus_client's."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvproxy.base.metrics.collectors import CallbackGauge, Counter, Histogram

BOUNDS = (0.005, 0.1, 1.0, 60.0)


def exposed(registry: CollectorRegistry) -> list[str]:
    """Return the exposition without the times of creation, which ours does not have."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_the_page_equals_prometheus_clients() -> None:
    """Names, types, help, labels, buckets and sums to the last character."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    for counter in (
        Counter("x_requests", "Requests", ["cluster", "status"], registry=ours),
        prometheus_client.Counter("x_requests", "Requests", ["cluster", "status"], registry=theirs),
    ):
        counter.labels("a", "200").inc()
        counter.labels("a", "200").inc(2.5)
        counter.labels('b"\n', 503).inc()
    for plain in (
        Counter("x_plain", "No labels", registry=ours),
        prometheus_client.Counter("x_plain", "No labels", registry=theirs),
    ):
        plain.inc()
    for histogram in (
        Histogram("x_seconds", "Time", ["cluster"], buckets=BOUNDS, registry=ours),
        prometheus_client.Histogram("x_seconds", "Time", ["cluster"], buckets=BOUNDS, registry=theirs),
    ):
        for value in (0.0, 0.005, 0.0051, 0.1, 0.5, 60.0, 61.0, 1e9):
            histogram.labels("a").observe(value)
    for histogram in (
        Histogram("y_seconds", "Unlabelled", buckets=BOUNDS, registry=ours),
        prometheus_client.Histogram("y_seconds", "Unlabelled", buckets=BOUNDS, registry=theirs),
    ):
        histogram.observe(0.2)
    assert exposed(ours) == exposed(theirs)


def test_a_removed_series_is_gone_and_starts_over() -> None:
    """An endpoint that left and came back begins at zero."""
    registry = CollectorRegistry()
    counter = Counter("x_requests", "Requests", ["endpoint"], registry=registry)
    counter.labels("a").inc(3)
    counter.remove("a")
    assert registry.get_sample_value("x_requests_total", {"endpoint": "a"}) is None
    counter.labels("a").inc()
    assert registry.get_sample_value("x_requests_total", {"endpoint": "a"}) == 1
    with pytest.raises(KeyError):
        counter.remove("b")


def test_labels_must_be_as_many_as_declared() -> None:
    """A series with a label missing would be exposed as another metric."""
    counter = Counter("x_requests", "Requests", ["endpoint", "status"], registry=CollectorRegistry())
    with pytest.raises(ValueError, match="x_requests"):
        counter.labels("a")


def test_a_name_is_taken_once() -> None:
    """The registry knows our metrics by name."""
    registry = CollectorRegistry()
    Counter("x_requests", "Requests", registry=registry)
    with pytest.raises(ValueError, match="x_requests"):
        Histogram("x_requests_total", "Another", buckets=BOUNDS, registry=registry)


def test_a_callback_that_counts_is_shown_as_a_counter() -> None:
    """Under the name that prometheus_client shows too, in both ways of writing a page."""
    registry = CollectorRegistry()
    recalls = CallbackGauge("x_recalls", "Recalls", ["result"], counts=True, registry=registry)
    recalls.set_source(lambda: [(("exact",), 3.0)])
    assert registry.get_sample_value("x_recalls_total", {"result": "exact"}) == 3.0
    assert "".join(recalls.texts()).splitlines()[1:] == [
        "# TYPE x_recalls_total counter",
        'x_recalls_total{result="exact"} 3.0',
    ]
