"""Shares of load and memory, from the source the settings name."""

from __future__ import annotations

import pytest

from kvproxy.base.types import Tier
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.metrics_scraper import EngineReadings
from kvproxy.cache.store import EVERY_INSTANCE, KvStore, TierMemory
from kvproxy.features.lmcache.pressure import (
    HostUse,
    Pressure,
    PressureGauge,
    engine_load,
    memory_series,
    sample_host,
)
from tests.cache.support import NOWHERE, cluster_of
from tests.features.lmcache.support import strategy
from tests.support.clock import FakeClock

CLUSTER = cluster_of({"a": NOWHERE, "b": NOWHERE})
ENDPOINT, OTHER = CLUSTER.endpoints


class Bench:
    """A gauge with its readings and its store."""

    def __init__(self, clock: FakeClock, **changes: object) -> None:
        self.engines = EngineReadings(clock=clock, max_age_s=20.0)
        self.store = KvStore()
        self.gauge = PressureGauge(
            strategy(**changes),
            clusters={"default": CLUSTER},
            engines=self.engines,
            store=self.store,
            sample_host=lambda: HostUse(cpu=0.5, memory=0.75),
        )

    def pressure(self, instance: str = "a") -> Pressure:
        return self.gauge.find_pressure(instance)


def test_an_engine_nobody_read_says_nothing(clock: FakeClock) -> None:
    assert Bench(clock).pressure() == Pressure(None, None)


def test_the_engines_own_figures(clock: FakeClock) -> None:
    under_test = Bench(clock)
    under_test.engines.note_scrape(ENDPOINT, EngineMetrics(kv_usage=0.7, running=64, waiting=0))
    assert under_test.pressure() == Pressure(0.25, 0.7)
    assert under_test.pressure("b") == Pressure(None, None)


def test_an_old_reading_says_nothing(clock: FakeClock) -> None:
    """An engine that stopped answering is not evicted from on what it said an hour ago."""
    under_test = Bench(clock)
    under_test.engines.note_scrape(ENDPOINT, EngineMetrics(kv_usage=1.0, running=1))
    clock.advance(21)
    assert under_test.pressure() == Pressure(None, None)


def test_lmcaches_memory_counts_where_it_is_known(clock: FakeClock) -> None:
    under_test = Bench(clock)
    under_test.engines.note_scrape(ENDPOINT, EngineMetrics(kv_usage=0.2))
    host, disk = TierMemory("a", Tier.HOST, 95, 100, 0.95), TierMemory("a", Tier.DISK, 10, 0, None)
    shared = TierMemory(EVERY_INSTANCE, Tier.SHARED, 99, 100, 0.99)
    under_test.store.memory = [host, disk, shared]
    assert under_test.pressure().memory == 0.95  # the fullest tier of its own
    assert dict(memory_series(under_test.store.memory)) == {
        ("a", "host", "used"): 95,
        ("a", "host", "capacity"): 100,
        ("a", "disk", "used"): 10,
        ("", "shared", "used"): 99,
        ("", "shared", "capacity"): 100,
    }
    assert under_test.pressure("b").memory is None


def test_the_hosts_figures_where_the_settings_say_so(clock: FakeClock) -> None:
    under_test = Bench(clock, load_source="host", memory_source="host")
    under_test.engines.note_scrape(ENDPOINT, EngineMetrics(kv_usage=0.1, running=0))
    assert under_test.pressure() == Pressure(None, None)
    under_test.gauge.tick()
    assert under_test.pressure() == Pressure(0.5, 0.75)


def test_engines_that_left_are_forgotten(clock: FakeClock) -> None:
    under_test = Bench(clock)
    under_test.engines.note_scrape(ENDPOINT, EngineMetrics(kv_usage=0.7))
    under_test.engines.keep_only(frozenset({OTHER}))
    assert under_test.pressure().memory is None


@pytest.mark.parametrize(
    ("metrics", "load"),
    [
        (EngineMetrics(), None),
        (EngineMetrics(running=0, waiting=0), 0.0),
        (EngineMetrics(running=256), 1.0),
        (EngineMetrics(running=1000), 1.0),
        (EngineMetrics(running=10, waiting=30), 0.75),
        (EngineMetrics(waiting=5), 1.0),
    ],
)
def test_load_is_the_busier_of_running_and_waiting(metrics: EngineMetrics, load: float | None) -> None:
    assert engine_load(metrics) == load


def test_the_host_is_sampled_without_blocking() -> None:
    use = sample_host()
    assert 0.0 <= use.cpu <= 1.0
    assert 0.0 < use.memory < 1.0
