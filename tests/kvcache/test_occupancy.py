"""How full the indexes and the engines are, as a scrape shows it."""

from __future__ import annotations

from array import array

from kvproxy.clients.engine_metrics import EngineMetrics
from kvproxy.kvcache.occupancy import engine_requests, kv_usage, utilisation
from kvproxy.types import EndpointId
from tests.kvcache.test_status import service_of
from tests.support.clock import FakeClock

A = EndpointId("a")


def test_engines_that_were_read_lately_show_their_figures(clock: FakeClock) -> None:
    """What a version does not say has no series, and a reading goes when it is old."""
    parts = service_of(clock).parts
    a, b = parts.clusters["c"].endpoints
    parts.signals.engine(a, EngineMetrics(kv_usage=0.25, running=3, waiting=1))
    parts.signals.engine(b, EngineMetrics(running=0))
    assert list(kv_usage(parts)) == [(("c", "a"), 0.25)]
    assert list(engine_requests(parts)) == [
        (("c", "a", "running"), 3), (("c", "a", "waiting"), 1), (("c", "b", "running"), 0)
    ]  # fmt: skip
    clock.advance(parts.signals.max_age_s + 1)
    assert list(kv_usage(parts)) == list(engine_requests(parts)) == []


def test_the_index_is_measured_against_each_endpoints_capacity(clock: FakeClock) -> None:
    """An endpoint whose engine keeps nothing has no share."""
    parts = service_of(clock).parts
    index = parts.local["c"].approximate
    index.set_capacity(A, 40)
    index.set_capacity(EndpointId("b"), 0)
    index.insert(A, index.locate(array("Q", range(1, 11))))
    assert list(utilisation(parts)) == [(("c", "a"), 0.25)]
