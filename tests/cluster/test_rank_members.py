"""An engine with data-parallel ranks is one member a rank: loads apart, address, health and breaker together."""

from __future__ import annotations

import logging

import pytest

from kvproxy.base.resilience.breaker import BreakerState
from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Condition
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.prober import ProbeOutcome
from kvproxy.cluster.settings import DataParallelSettings, EndpointSettings
from tests.cluster.conftest import Bench, MakeCluster, configs

A, A0, A1, B = (EndpointId(name) for name in ("a", "a@0", "a@1", "b"))
TWO = DataParallelSettings(ranks=(0, 1))


def names(bench: Bench) -> list[str]:
    return [str(endpoint.id) for endpoint in bench.cluster.endpoints]


def ranked(make_cluster: MakeCluster, **settings: object) -> Bench:
    """Engine a with two ranks, and b."""
    return make_cluster(endpoints=(*configs("a", data_parallel=TWO), *configs("b")), **settings)


def test_each_rank_is_a_member_of_its_own(make_cluster: MakeCluster) -> None:
    """They share what is the engine's; the load of one is not the other's."""
    bench = ranked(make_cluster)
    assert names(bench) == ["a@0", "a@1", "b"]
    first, second, other = bench.cluster.endpoints
    assert (first.rank, second.rank, other.rank) == (0, 1, None)
    assert first.engine is second.engine is not other.engine
    assert first.health is second.health
    assert first.breaker is second.breaker
    assert first.origin == second.origin
    assert (first.instance_id, second.instance_id) == ("a", "a")
    assert [engine.id for engine in bench.cluster.engines] == ["a", "b"]
    bench.picked(preferred=A1)
    assert (first.load.in_flight, second.load.in_flight) == (0, 1)
    assert bench.sample("kvproxy_in_flight_requests", cluster="c", endpoint="a@1") == 1
    status = second.status(bench.clock())
    assert (status["id"], status["engine_id"], status["data_parallel_rank"]) == ("a@1", "a", 1)
    assert "data_parallel_rank" not in other.status(bench.clock())


def test_ranks_are_well_or_not_together(make_cluster: MakeCluster) -> None:
    """A failure of one would be one of the others; each of them counts as taken out."""
    bench = ranked(make_cluster, health={"eject_after": 2})
    bench.outcomes("a@0", AttemptOutcome.FAILURE)
    bench.outcomes("a@1", AttemptOutcome.FAILURE)
    assert [endpoint.condition(bench.clock()) for endpoint in bench.cluster.endpoints[:2]] == [Condition.EJECTED] * 2
    assert bench.ids() == {"b"}
    for name in ("a@0", "a@1"):
        assert bench.sample("kvproxy_ejections_total", cluster="c", endpoint=name, reason="failures") == 1


def test_one_probe_speaks_for_all_ranks(make_cluster: MakeCluster) -> None:
    """And what waits on any of them for its first byte is offered back."""
    bench = ranked(make_cluster)
    given_back = []
    for name in (A0, A1, B):
        bench.picked(preferred=name).on_unhealthy(lambda name=name: given_back.append(name))
    engine = bench.cluster.engines[0]
    bench.cluster.verdicts.record_probe(engine, ProbeOutcome.UNREACHABLE)
    assert given_back == [A0, A1]
    assert [bench.endpoint(name).condition(bench.clock()) for name in ("a@0", "a@1", "b")] == [
        Condition.UNHEALTHY,
        Condition.UNHEALTHY,
        Condition.UP,
    ]
    assert bench.sample("kvproxy_health_probes_total", cluster="c", endpoint="a@1", outcome="unreachable") == 1


def test_one_breaker_opens_for_all_ranks(make_cluster: MakeCluster) -> None:
    """It has a series a rank, as every endpoint has."""
    bench = ranked(make_cluster, breaker={"failure_threshold": 2}, health={"eject_after": 0})
    bench.outcomes("a@0", AttemptOutcome.FAILURE, times=2)
    assert bench.endpoint("a@1").breaker.state is BreakerState.OPEN
    assert bench.endpoint("a@1").condition(bench.clock()) is Condition.BREAKER_OPEN
    for name in ("a@0", "a@1"):
        assert bench.sample("kvproxy_breaker_open", breaker=f"c/{name}") == 1
        assert bench.sample("kvproxy_ejections_total", cluster="c", endpoint=name, reason="breaker_open") == 1


def test_ejection_counts_engines(make_cluster: MakeCluster) -> None:
    """Of two engines one may be out, whatever the ranks."""
    bench = ranked(make_cluster, health={"eject_after": 1, "max_ejected": 0.5})
    bench.outcomes("b", AttemptOutcome.FAILURE)
    bench.outcomes("a@0", AttemptOutcome.FAILURE)
    assert bench.ids() == {"a@0", "a@1"}


def test_an_engine_that_fails_alone_is_judged_by_other_engines(make_cluster: MakeCluster) -> None:
    """Its own ranks say nothing about it, and an outage is counted once an engine."""
    bench = make_cluster(endpoints=configs("a", data_parallel=TWO), health={"eject_after": 0})
    bench.outcomes("a@0", AttemptOutcome.FAILURE, times=3)
    assert not bench.cluster.verdicts.has_outage("", bench.clock())
    assert not bench.cluster.verdicts.is_spared(
        bench.endpoint("a@0"), "", reason="status_500", client="", now=bench.clock()
    )
    bench.outcomes("a@1", AttemptOutcome.FAILURE, times=3)
    assert bench.cluster.verdicts.has_outage("", bench.clock())


def test_ranks_that_become_known_take_the_engines_place(make_cluster: MakeCluster) -> None:
    """Health goes on, requests in flight finish where they are, and the series of the engine as one end with them."""
    bench = make_cluster("a", "b", health={"eject_after": 3})
    bench.outcomes("a", AttemptOutcome.FAILURE, times=2)
    running, engine = bench.picked(preferred=A), bench.cluster.engines[0]
    bench.cluster.ranks.observe_ranks(engine, (0, 1), (0, 1))
    assert names(bench) == ["a@0", "a@1", "b"]
    assert bench.endpoint("a@0").engine is engine
    assert bench.endpoint("a@0").health.failures == 2
    assert [str(one.id) for one in bench.cluster.members.departures.endpoints] == ["a"]
    running.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert bench.series("a") == []
    assert bench.cluster.members.departures.endpoints == []
    bench.cluster.ranks.observe_ranks(engine, (0,), None)
    assert names(bench) == ["a", "b"]
    assert bench.series("a@0") == []


def test_unchanged_settings_change_nothing(make_cluster: MakeCluster) -> None:
    """Endpoints keep their loads however often their ranks are read, and over a reload."""
    bench = make_cluster("a")
    engine = bench.cluster.engines[0]
    bench.cluster.ranks.observe_ranks(engine, (0, 1), (0, 1))
    before = bench.cluster.endpoints
    bench.cluster.ranks.observe_ranks(engine, (0, 1), (0, 1))
    bench.cluster.apply_endpoints(configs("a", weight=2))
    assert bench.cluster.endpoints == before
    assert before[0].weight == 2


def test_an_engine_at_another_address_is_to_be_asked_again(make_cluster: MakeCluster) -> None:
    """Findings about the one before prove nothing."""
    bench = make_cluster("a")
    engine = bench.cluster.engines[0]
    bench.cluster.ranks.observe_ranks(engine, (0, 1), (0, 1))
    bench.cluster.apply_endpoints((EndpointSettings(id="a", url="http://127.0.0.1:9"),))
    assert names(bench) == ["a"]
    bench.cluster.ranks.observe_ranks(engine, (0, 1, 2), (0, 1, 2))  # a reading that comes late
    assert names(bench) == ["a"]


def test_a_refused_rank_leaves(make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once; requests under way there finish. When the engine was away and is healthy again, it is
    back."""
    bench = make_cluster(endpoints=configs("a", data_parallel=TWO))
    running = bench.picked(preferred=A1)
    with caplog.at_level(logging.WARNING):
        bench.cluster.ranks.record_refusal(running.endpoint, 1)
        bench.cluster.ranks.record_refusal(running.endpoint, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "c/a has no data-parallel rank 1, which is no longer a candidate"
    ]
    assert bench.ids() == {"a@0"}
    labels = {"cluster": "c", "endpoint": "a@1"}
    assert bench.sample("kvproxy_rank_refusals_total", outcome="dropped", **labels) == 1
    assert bench.sample("kvproxy_rank_refusals_total", outcome="late", **labels) == 1
    running.settle(AttemptOutcome.SUCCESS, bench.clock())
    engine = bench.cluster.engines[0]
    for outcome in (ProbeOutcome.FAILED, ProbeOutcome.OK):
        bench.cluster.verdicts.record_probe(engine, outcome)
    assert bench.ids() == {"a@0", "a@1"}


def test_an_operator_speaks_of_a_rank_or_of_all_of_an_engine(make_cluster: MakeCluster) -> None:
    """Drain, weigh and remove by the id of either."""
    bench = ranked(make_cluster)
    cluster = bench.cluster
    assert [str(one.id) for one in cluster.members.find_named(A)] == ["a@0", "a@1"]
    assert [str(one.id) for one in cluster.members.find_named(A1)] == ["a@1"]
    assert cluster.members.find_named(EndpointId("z")) == ()
    assert cluster.operator.drain_endpoint(A1)
    assert bench.ids() == {"a@0", "b"}
    assert cluster.operator.drain_endpoint(A)
    assert bench.ids() == {"b"}
    assert cluster.operator.drain_endpoint(A, draining=False)
    assert cluster.operator.reweight_endpoint(A, 3)
    assert cluster.operator.reweight_endpoint(A0, 5)
    assert [bench.endpoint(name).weight for name in ("a@0", "a@1", "b")] == [5, 3, 1]
    assert cluster.operator.remove_endpoint(A0)
    assert names(bench) == ["a@1", "b"]
    cluster.apply_endpoints((*configs("a", data_parallel=TWO), *configs("b")))
    assert names(bench) == ["a@1", "b"]
    assert cluster.operator.remove_endpoint(A)
    assert names(bench) == ["b"]
    assert cluster.operator.add_endpoint(*configs("a", data_parallel=TWO))
    assert names(bench) == ["a@0", "a@1", "b"]
    assert not cluster.operator.remove_endpoint(EndpointId("z"))
    assert not cluster.operator.reweight_endpoint(EndpointId("z"), 2)
    assert not cluster.operator.drain_endpoint(EndpointId("z"))


def test_an_operators_order_for_an_engine_holds_for_its_ranks(make_cluster: MakeCluster) -> None:
    """They may become known afterwards."""
    bench = make_cluster("a", "b")
    bench.cluster.operator.drain_endpoint(A)
    bench.cluster.operator.reweight_endpoint(A, 3)
    bench.cluster.ranks.observe_ranks(bench.cluster.engines[0], (0, 1), (0, 1))
    assert bench.ids() == {"b"}
    assert [endpoint.weight for endpoint in bench.cluster.endpoints] == [3, 3, 1]
    bench.cluster.operator.drain_endpoint(A, draining=False)
    assert bench.ids() == {"a@0", "a@1", "b"}
    bench.cluster.apply_endpoints(configs("a", "b", weight=4))
    assert [endpoint.weight for endpoint in bench.cluster.endpoints] == [4, 4, 4]


def test_a_returning_engine_finds_its_ranks(make_cluster: MakeCluster) -> None:
    """Those that still have requests go on with their loads."""
    bench = ranked(make_cluster)
    running = bench.picked(preferred=A1)
    bench.cluster.apply_endpoints(configs("b"))
    bench.cluster.apply_endpoints((*configs("b"), *configs("a", data_parallel=TWO)))
    assert names(bench) == ["b", "a@0", "a@1"]
    assert bench.endpoint("a@1") is running.endpoint
    assert bench.endpoint("a@0").engine is running.endpoint.engine


def test_an_endpoint_that_has_a_ranks_id_goes_before_it(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids are unique; the operator is told."""
    bench = make_cluster(endpoints=(*configs("a", data_parallel=TWO), *configs("a@1")))
    assert names(bench) == ["a@0", "a@1"]
    assert bench.endpoint("a@1").rank is None
    assert "another endpoint has its id a@1" in caplog.text


def test_ranks_of_the_cluster_are_those_of_each_engine(make_cluster: MakeCluster) -> None:
    """Where the endpoint says nothing else. A reload may change it."""
    bench = make_cluster("a", "b", data_parallel={"ranks": [0, 1]})
    assert names(bench) == ["a@0", "a@1", "b@0", "b@1"]
    settings = bench.cluster.settings.model_copy(update={"data_parallel": DataParallelSettings(steer=False)})
    bench.cluster.reconfigure(settings, probe=None)
    assert names(bench) == ["a", "b"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_request_may_fail_after_its_engine_left(make_cluster: MakeCluster, replaced: bool) -> None:
    """Its verdict is about an engine that is no member any more, whatever has the id now."""
    bench = ranked(make_cluster, health={"eject_after": 1}, breaker={"failure_threshold": 1})
    running = bench.picked(preferred=A1)
    moved = EndpointSettings(id="a", url="http://127.0.0.1:9", data_parallel=TWO)
    bench.cluster.apply_endpoints((*configs("b"), *((moved,) if replaced else ())))
    running.settle(AttemptOutcome.FAILURE, bench.clock())
    bench.cluster.verdicts.record_probe(running.endpoint.engine, ProbeOutcome.UNREACHABLE)
    assert bench.cluster.members.departures.endpoints == []
    assert {endpoint.condition(bench.clock()) for endpoint in bench.cluster.endpoints} == {Condition.UP}
    bench.cluster.ranks.record_refusal(running.endpoint, 1)
    assert names(bench) == (["b", "a@0", "a@1"] if replaced else ["b"])
