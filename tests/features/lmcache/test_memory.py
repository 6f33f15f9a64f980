"""Memory of LMCache's instances, read with the engines' metrics."""

from __future__ import annotations

from typing import Any

from kvproxy.features.lmcache.observer import LMCacheObserver
from kvproxy.features.lmcache.pressure import Pressure
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from tests.cache.fleet import simulated
from tests.cache.support import Fake, Service, cluster_of, running, settings, world
from tests.cache.test_watch import engine, round_of
from tests.support.until import until

PINNING = {"enable_pinning": True}


def pressure(service: Service) -> Pressure:
    observer = service.kv.observers.find(LMCacheObserver)
    assert observer is not None
    assert observer.store.strategies is not None
    return observer.store.strategies.pressure.find_pressure(service.cluster.endpoints[0].instance_id)


async def test_readings_become_pressure() -> None:
    async with world({"a": engine(usage=0.75)}, Fake({}), cache_strategy=PINNING) as service:
        await round_of(service)
        assert pressure(service) == Pressure(0.25, 0.75)


async def test_lmcaches_own_memory_is_read_too() -> None:
    """The coordinator knows how full each instance is."""
    async with simulated(names=("a",), controller=None, coordinator=CoordinatorSettings(capacity_chunks=4)) as place:
        assert place.fleet.coordinator is not None
        place.fleet.coordinator.admit("a", list(range(1024)), model_name="m")
        config = settings(lmcache_endpoint=place.lmcache, provider="coordinator", cache_strategy=PINNING)
        async with running(config, cluster_of(place.engines)) as service:
            await round_of(service)
            assert pressure(service).memory == 1.0


async def test_a_lmcache_server_that_comes_later_is_copied_from_too() -> None:
    """Whether servers read each other's memory is seen in every round, not at the start alone."""
    listed: list[dict[str, Any]] = []
    lmcache = Fake(
        {
            "/instances": lambda _: {"instances": listed},
            "/instances/usage": lambda _: {"instances": [], "shared_modules": []},
            "/directory/stats": lambda _: {"num_keys": 0},
        }
    )
    async with world({"a": engine()}, lmcache, provider="coordinator") as service:
        store = service.kv.overlap.store
        await until(lambda: lmcache.calls["/instances"])  # the look at it that is taken at the start
        assert not store.copies
        listed.append({"instance_id": "a", "ip": "127.0.0.1", "http_port": 1, "p2p_advertised_url": "x:1"})
        await round_of(service)
        assert store.copies


async def test_a_lmcache_that_is_down_says_nothing() -> None:
    async with world({"a": engine()}, Fake({}), provider="coordinator", cache_strategy=PINNING) as service:
        await round_of(service)
        assert pressure(service).memory == 0.5
