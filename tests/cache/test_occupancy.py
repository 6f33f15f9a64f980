"""How full the indexes and the engines are, as a scrape shows it."""

from __future__ import annotations

from array import array

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from tests.cache.support import service_of
from tests.support.clock import FakeClock

A = EndpointId("a")


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values by labels but the cluster's, as scraped."""
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "cluster"): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_engines_that_were_read_lately_show_their_figures(clock: FakeClock) -> None:
    """A figure that a version does not report has no series, and an old reading is dropped."""
    metrics = Metrics()
    service = service_of(clock, metrics=metrics)
    a, b = service.clusters["c"].endpoints
    service.scraper.signals.note_scrape(a, EngineMetrics(kv_usage=0.25, running=3, waiting=1))
    service.scraper.signals.note_scrape(b, EngineMetrics(running=0))
    assert samples(metrics, "kvproxy_engine_kv_usage_ratio") == {("a",): 0.25}
    assert samples(metrics, "kvproxy_engine_requests") == {
        ("a", "running"): 3,
        ("a", "waiting"): 1,
        ("b", "running"): 0,
    }
    clock.advance(service.scraper.signals.max_age_s + 1)
    assert samples(metrics, "kvproxy_engine_kv_usage_ratio") == samples(metrics, "kvproxy_engine_requests") == {}


def test_reuse_is_shown_by_endpoint_and_tier(clock: FakeClock) -> None:
    """Their own counters, which begin again with the engine."""
    metrics = Metrics()
    service = service_of(clock, metrics=metrics)
    a, b = service.clusters["c"].endpoints
    service.scraper.signals.note_scrape(a, EngineMetrics(cached_from={"device": 1472, "unspecified": 1280}))
    service.scraper.signals.note_scrape(b, EngineMetrics())
    assert samples(metrics, "kvproxy_engine_cached_tokens") == {("a", "device"): 1472, ("a", "unspecified"): 1280}


def test_the_index_is_measured_against_each_endpoints_capacity(clock: FakeClock) -> None:
    """An endpoint whose engine keeps nothing has no share."""
    metrics = Metrics()
    service = service_of(clock, metrics=metrics)
    index = service.overlap.indexes["c"].approximate
    index.set_capacity(A, 40)
    index.set_capacity(EndpointId("b"), 0)
    index.insert(A, index.locate(array("Q", range(1, 11))))
    assert samples(metrics, "kvproxy_kvcache_index_utilisation_ratio") == {("a",): 0.25}
