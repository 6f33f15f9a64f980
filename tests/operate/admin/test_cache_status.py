"""Event streams, leases and hot prefixes in the status."""

from __future__ import annotations

from array import array

import pytest

from kvproxy.base.errors import ClientUnavailable
from kvproxy.base.types import EndpointId
from kvproxy.operate.admin.cache_status import cache_status, hot_prefixes, troubles
from tests.cache.support import service_of
from tests.support.clock import FakeClock


async def test_hot_prefixes_are_looked_for_in_slices(clock: FakeClock) -> None:
    """Other tasks get their turn in between, and what vanished meanwhile is not shown."""
    service = service_of(clock)
    index, a, b = service.overlap.indexes["c"].approximate, EndpointId("a"), EndpointId("b")
    for number in range(1, 100):
        index.confirm(index.route(a, index.locate(array("Q", [number]))))
    for _ in range(3):
        index.confirm(index.route(a, index.locate(array("Q", [7, 7000]))))
    index.insert(b, index.locate(array("Q", [7])))
    pauses = 0

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1

    found = await hot_prefixes(service, 2, slice_s=0.0, sleep=pause)
    assert pauses == 100
    assert [(one["prefix"], one["blocks"], one["replicas"]) for one in found] == [
        (f"{7:016x}", 1, {"a": 1, "b": 1}),
        (f"{7000:016x}", 2, {"a": 2, "b": 1}),
    ]
    emptied = index.counts.all_runs()

    async def empty(_: float) -> None:
        for endpoint in index.counts.endpoints:
            index.remove(endpoint)
        while not index.sweep(100):
            pass

    assert await hot_prefixes(service, 2, slice_s=0.0, sleep=empty) == []
    assert index.counts.requests(emptied[0]) == 0.0


async def test_a_service_that_fails_is_a_trouble(clock: FakeClock) -> None:
    """Since when, why, and what it means, for the page and `/cache/status`."""
    service = service_of(clock)

    async def fail() -> None:
        raise ClientUnavailable("lmcache controller /lookup: ConnectError")

    assert troubles(service) == []
    for _ in range(service.settings.circuit_breaker.failure_threshold):
        with pytest.raises(ClientUnavailable):
            await service.breakers.call("lookup", fail)
    clock.advance(12.0)
    (trouble,) = troubles(service)
    assert (trouble["kind"], trouble["what"], trouble["for_s"]) == ("service", "lookup", 12.0)
    assert trouble["last_error"] == "lmcache controller /lookup: ConnectError"
    assert "routed by the approximate index" in str(trouble["meaning"])
    assert (await cache_status(service))["troubles"] == [trouble]
