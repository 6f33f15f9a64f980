"""One page of metrics out of several."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvproxy.base.metrics.across_workers import Across, rule_of
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.metrics import EndpointRequestMetrics, EndpointStateMetrics
from kvproxy.features.workers.answers import add_pages, keep_counts, parse_page, write_page
from kvproxy.operate.metrics.catalog import merge_rules
from kvproxy.operate.metrics.page import render_exposition
from kvproxy.operate.metrics.reference import describe_metrics


async def page_of(metrics: Metrics) -> str:
    """As a scrape of one worker."""
    return (await render_exposition(metrics.registry)).decode()


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """By name and the values of the labels, as Prometheus reads it."""
    return {
        (one.name, ",".join(one.labels.values())): one.value
        for family in text_string_to_metric_families(page.decode())
        for one in family.samples
    }


async def test_counters_and_histograms_are_summed() -> None:
    """Series that only one worker has are there too; label values may hold anything."""
    both = Metrics(), Metrics()
    for metrics, count in zip(both, (2, 3), strict=True):
        metrics.group(EndpointRequestMetrics).finished.labels("c", "a", "200").inc(count)
        metrics.group(EndpointRequestMetrics).ttft.labels("c", "a", "m", "true").observe(0.02 * count)
    both[1].group(EndpointRequestMetrics).finished.labels("c", 'b "x" 1', "500").inc()
    found = samples(write_page(add_pages([parse_page(await page_of(one)) for one in both], merge_rules())))
    assert found["kvproxy_requests_total", "c,a,200"] == 5
    assert found["kvproxy_requests_total", 'c,b "x" 1,500'] == 1
    assert found["kvproxy_ttft_seconds_count", "c,a,m,true"] == 2
    assert found["kvproxy_ttft_seconds_sum", "c,a,m,true"] == pytest.approx(0.1)
    assert found["kvproxy_ttft_seconds_bucket", "c,a,m,true,0.05"] == 1


@pytest.mark.parametrize(
    ("rule", "one", "other", "expected"),
    [
        (Across.SUM, 2, 3, 5),
        (Across.MAX, 2, 3, 3),
        (Across.MIN, 2, 3, 2),
        (Across.MEAN, 2, 3, 2.5),
        (Across.REST, 0.5, 0.75, 0.25),
        (Across.REST, 0.25, 0.5, 0.0),
    ],
)
def test_a_gauge_follows_its_rule(rule: Across, one: float, other: float, expected: float) -> None:
    """Loads add up, what all look at does not, shares are averaged."""
    name = next((name for name, its in merge_rules().items() if its is rule), "kvproxy_in_flight_requests")
    pages = [parse_page(f"# TYPE {name} gauge\n{name} {value}\n") for value in (one, other)]
    assert add_pages(pages, merge_rules())[name].series == {name: expected}


async def test_counts_of_a_dead_worker_remain() -> None:
    """A sum that falls would look like a restart, and like as many requests again; its gauges go with it."""
    metrics = Metrics()
    metrics.group(EndpointRequestMetrics).finished.labels("c", "a", "200").inc(7)
    metrics.group(EndpointStateMetrics).in_flight.labels("c", "a").set(4)
    gone = keep_counts(parse_page(await page_of(metrics)))
    found = samples(write_page(add_pages([gone, parse_page(await page_of(Metrics()))], merge_rules())))
    assert found["kvproxy_requests_total", "c,a,200"] == 7
    assert ("kvproxy_in_flight_requests", "c,a") not in found


async def test_a_page_alone_stays_what_it_is() -> None:
    """Heads, series and values."""
    metrics = Metrics()
    metrics.group(EndpointRequestMetrics).finished.labels("c", "a", "200").inc()
    metrics.group(BoundMetrics).queue_depth.labels("x").set(1.5)
    text = await page_of(metrics)
    assert samples(write_page(add_pages([parse_page(text)], merge_rules()))) == samples(text.encode())


def test_rules_are_of_gauges_that_there_are() -> None:
    """A metric that is renamed takes its rule along."""
    kinds = {one.name: one.kind for each in describe_metrics().values() for one in each}
    ours = [name for name in merge_rules() if name.startswith("kvproxy_")]
    assert [name for name in ours if kinds.get(name) != "gauge"] == []
    assert rule_of("kvproxy_requests_total", "counter", merge_rules()) is Across.SUM
