"""The page of a scrape, held against prometheus_client's, and how it shares the event loop."""

from __future__ import annotations

import asyncio

import prometheus_client
import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvproxy.base.metrics.collectors import CallbackGauge, Counter, Gauge, Histogram
from kvproxy.base.metrics.exposition import Registry
from kvproxy.base.metrics.groups import Metrics
from kvproxy.operate.metrics.page import render_exposition
from tests.support.clock import FakeClock

AWKWARD = ("plain", 'quote"', "back\\slash", "c:\\new", "new\nline", "100%", "{brace}", "ünïcode", "")


def families(page: bytes) -> list[Metric]:
    """As Prometheus' own parser for Python reads it; equal when names, types, help, labels and values are."""
    return list(text_string_to_metric_families(page.decode()))


def filled(registry: Registry) -> Registry:
    """Every kind of collector, awkward label values, values of every size."""
    counter = Counter("x_requests", 'Requests\nof "all" \\ kinds, 100%', ["cluster", "status"], registry=registry)
    for number, text in enumerate(AWKWARD):
        counter.labels(text, 200 + number).inc(10.0**number + 0.25)
    Counter("x_plain", "No labels", registry=registry).inc(1e300)
    histogram = Histogram("x_seconds", "Time", ["cluster"], buckets=(0.00001, 0.5, 1000.0), registry=registry)
    for text in AWKWARD:
        for value in (0.0, 0.00001, 0.3, 999.0, 1e9):
            histogram.labels(text).observe(value)
    Histogram("y_seconds", "Unlabelled", buckets=(1.0,), registry=registry).observe(0.1 + 0.2)
    CallbackGauge("x_level", "Level", ["tank"], registry=registry).set_source(
        lambda: [((text,), value) for text, value in zip(AWKWARD, (0.0, -1.5, 1e-9, 1e21, float("inf")), strict=False)]
    )
    CallbackGauge("y_level", "Unlabelled", registry=registry).set_source(lambda: [((), 2.0)])
    gauge = Gauge("z_level", "Set or read", ["tank"], registry=registry)
    for number, text in enumerate(AWKWARD):
        gauge.labels(text).set_function(lambda number=number: -(7.5**number))  # type: ignore[misc]
    gauge.labels("plain").set(True)
    Gauge("z_plain", "Unlabelled", registry=registry).set(float("inf"))
    prometheus_client.Gauge("x_gauge", "Theirs", ["queue"], registry=registry).labels('a"b').set(3)
    return registry


async def test_the_page_says_what_prometheus_client_would_say() -> None:
    """Same names, types, help, labels and values, in the same order."""
    registry = filled(Registry())
    for _ in range(2):  # texts are made by the first scrape and kept for the second
        page = await render_exposition(registry)
        assert families(page) == families(generate_latest(registry))
    assert page.count(b"\n") == len(page.splitlines()) > 80


async def test_the_whole_catalogue_is_on_the_page() -> None:
    """Empty families too: a dashboard finds the metric before its first series."""
    metrics = Metrics()
    assert families(await render_exposition(metrics.registry)) == families(generate_latest(metrics.registry))


async def test_the_next_page_has_the_next_values() -> None:
    """Kept text has no values; removed series are gone, and those that return start over."""
    registry = Registry()
    counter = Counter("x_requests", "Requests", ["endpoint"], registry=registry)
    counter.labels("a").inc()
    counter.labels("b").inc()
    await render_exposition(registry)
    counter.labels("a").inc()
    counter.remove("b")
    assert b'x_requests_total{endpoint="a"} 2.0\n' in await render_exposition(registry)
    assert b'"b"' not in await render_exposition(registry)
    counter.labels("b").inc()
    assert b'x_requests_total{endpoint="b"} 1.0\n' in await render_exposition(registry)


async def test_a_long_page_is_written_in_slices() -> None:
    """Others have their turn whenever a slice is used up, and see series come and go meanwhile."""
    registry, clock = Registry(), FakeClock()
    histogram = Histogram("x_seconds", "Time", ["endpoint"], buckets=(1.0,), registry=registry)
    for number in range(10):
        histogram.labels(number).observe(0.5)
    pauses = 0

    def tick() -> float:
        clock.advance(0.0004)
        return clock()

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 1:
            histogram.remove(9)
            histogram.labels("late").observe(0.5)

    page = await render_exposition(registry, slice_s=0.001, clock=tick, sleep=pause)
    assert pauses >= 3
    (family,) = families(page)
    shown = {sample.labels["endpoint"] for sample in family.samples}
    assert shown == {str(number) for number in range(9)}


@pytest.mark.parametrize("kind", ["gauge", "callback gauge"])
async def test_a_gauge_of_many_endpoints_is_written_in_slices(kind: str) -> None:
    """However many endpoints there are: each series is a piece of its own."""
    registry, clock = Registry(), FakeClock()
    if kind == "gauge":
        gauge = Gauge("x_up", "Up", ["endpoint"], registry=registry)
        for number in range(100):
            gauge.labels(number).set_function(lambda: 1.0)
    else:
        series = [((str(number),), 1.0) for number in range(100)]
        CallbackGauge("x_up", "Up", ["endpoint"], registry=registry).set_source(lambda: series)
    pauses = 0

    def tick() -> float:
        clock.advance(0.0002)
        return clock()

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1

    page = await render_exposition(registry, slice_s=0.001, clock=tick, sleep=pause)
    assert pauses >= 10
    assert families(page) == families(generate_latest(registry))


async def test_other_tasks_run_during_a_scrape() -> None:
    """By default a pause lets the event loop go round."""
    registry = filled(Registry())
    other = asyncio.create_task(asyncio.sleep(0))
    await render_exposition(registry, slice_s=0.0)
    assert other.done()


async def test_buckets_of_a_series_belong_together() -> None:
    """A request that ends between two slices changes a series before or after its text, never within."""
    registry = Registry()
    histogram = Histogram("x_seconds", "Time", ["endpoint"], buckets=(1.0,), registry=registry)
    series = [histogram.labels(number) for number in range(20)]

    async def pause(_: float) -> None:
        for one in series:
            one.observe(0.5)

    (family,) = families(await render_exposition(registry, slice_s=0.0, sleep=pause))
    by_endpoint: dict[str, set[float]] = {}
    for sample in family.samples:
        if sample.name != "x_seconds_sum":
            by_endpoint.setdefault(sample.labels["endpoint"], set()).add(sample.value)
    assert all(len(values) == 1 for values in by_endpoint.values())
    assert len(set().union(*by_endpoint.values())) > 1


def test_a_refused_collector_is_not_shown() -> None:
    """A name that is taken stays whose it was."""
    registry = Registry()
    Counter("x_requests", "Requests", registry=registry)
    with pytest.raises(ValueError, match="x_requests"):
        Counter("x_requests", "Requests again", registry=registry)
    assert len(registry.collectors) == 1
