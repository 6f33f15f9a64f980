"""Requests that other proxies have in flight count against an endpoint's bound, at once and as long as reported."""

from __future__ import annotations

from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.prober import ProbeOutcome
from kvproxy.cluster.routing.remote_load import LoadRow, RemoteLoad
from kvproxy.cluster.routing.work import NO_WORK
from kvproxy.cluster.settings import HealthCheckSettings
from tests.cluster.conftest import Bench, MakeCluster


def tell(bench: Bench, name: str, in_flight: int) -> None:
    """Another proxy says how many of its requests are there."""
    endpoint = bench.endpoint(name)
    if endpoint.load.remote_load is None:
        endpoint.load.remote_load = RemoteLoad(endpoint.load)
    before = endpoint.load.in_flight
    endpoint.load.remote_load.tell("other", LoadRow(in_flight, 0, NO_WORK, 0.0, 0.0, NO_WORK), bench.clock())
    endpoint.receive_load(before)


def test_an_endpoint_that_others_filled_is_full(make_cluster: MakeCluster) -> None:
    """The next request here goes elsewhere already; when they are done it has room again."""
    bench = make_cluster("a", "b", max_in_flight=20)
    assert bench.ids() == {"a", "b"}
    tell(bench, "a", 10)
    assert bench.ids() == {"a", "b"}
    tell(bench, "a", 20)
    assert bench.ids() == {"b"}
    tell(bench, "a", 25)
    assert bench.ids() == {"b"}
    tell(bench, "a", 10)
    assert bench.ids() == {"a", "b"}


def test_own_requests_and_others_fill_it_together(make_cluster: MakeCluster) -> None:
    """Neither alone is at the bound."""
    bench = make_cluster("a", max_in_flight=2)
    own = bench.picked()
    tell(bench, "a", 1)
    assert bench.pick() is None
    tell(bench, "a", 0)
    second = bench.picked()
    assert bench.pick() is None
    for pick in (own, second):
        pick.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert bench.endpoint("a").load.in_flight == 0


def test_a_probe_that_was_not_sent_says_nothing(make_cluster: MakeCluster) -> None:
    """For want of a socket here: however often, the engine is neither blamed nor praised for it."""
    bench = make_cluster("a", "b", health=HealthCheckSettings(unhealthy_threshold=1))
    verdicts, engine = bench.cluster.verdicts, bench.endpoint("a").engine
    for _ in range(5):
        verdicts.record_probe(engine, ProbeOutcome.NOT_SENT)
    assert bench.ids() == {"a", "b"}
    assert bench.sample("kvproxy_health_probes_total", cluster="c", endpoint="a", outcome="not_sent") == 5
    verdicts.record_probe(engine, ProbeOutcome.FAILED)
    assert bench.ids() == {"b"}
    for _ in range(5):
        verdicts.record_probe(engine, ProbeOutcome.NOT_SENT)
    assert bench.ids() == {"b"}
