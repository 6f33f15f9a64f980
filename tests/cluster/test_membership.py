"""Endpoints that come, go, move, change weight - and what of them survives."""

from __future__ import annotations

import logging

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Condition
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.settings import EndpointSettings
from tests.cluster.conftest import MakeCluster, configs

A, B = EndpointId("a"), EndpointId("b")
MOVED = EndpointSettings(id="a", url="http://127.0.0.1:9")


def test_unchanged_endpoints_keep_their_state(make_cluster: MakeCluster) -> None:
    """Load, health and breaker survive an update of weights, models and keys."""
    bench = make_cluster("a", "b", health={"eject_after": 1})
    running = bench.picked(preferred=B)
    bench.outcomes("a", AttemptOutcome.FAILURE)
    before = bench.cluster.endpoints
    bench.cluster.apply_endpoints(configs("a", "b", "c", weight=2, models=("x",), instance_id="i", api_key="k"))
    assert bench.cluster.endpoints[:2] == before
    endpoint = bench.endpoint("a")
    assert endpoint.condition(bench.clock()) is Condition.EJECTED
    assert (endpoint.weight, endpoint.models, endpoint.instance_id) == (2, {"x"}, "i")
    assert endpoint.authorization == b"Bearer k"
    assert running.endpoint.load.in_flight == 1


def test_an_endpoint_that_finishes_elsewhere_takes_no_series_along(make_cluster: MakeCluster) -> None:
    """It left, and one of its id came at another address before its last request ended: the series are that one's."""
    bench = make_cluster("a", "b")
    bench.cluster.bind_gauges()
    last = bench.picked(preferred=A)
    last.endpoint.metrics.count_request(200)
    bench.cluster.apply_endpoints(configs("b"))
    bench.cluster.apply_endpoints((MOVED, *configs("b")))
    bench.endpoint("a").metrics.count_request(200)
    last.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert bench.sample("kvproxy_endpoint_up", cluster="c", endpoint="a") == 1.0
    assert bench.sample("kvproxy_requests_total", cluster="c", endpoint="a", status="200") == 1.0
    bench.cluster.apply_endpoints(configs("b"))
    assert bench.series("a") == []


def test_unchanged_endpoints_are_not_touched(make_cluster: MakeCluster) -> None:
    """Of thousands of endpoints an update configures those whose settings are others, and none twice; a reload all."""
    bench = make_cluster("a", "b")
    a, b = configs("a", "b")
    bench.cluster.apply_endpoints((a, b))
    for endpoint in bench.cluster.endpoints:
        endpoint.max_in_flight = 77  # until it is configured
    bench.cluster.apply_endpoints((a, b.model_copy(update={"weight": 3})))
    assert [(one.max_in_flight, one.weight) for one in bench.cluster.endpoints] == [(77, 1), (0, 3)]
    bench.cluster.reconfigure(bench.cluster.settings.model_copy(update={"max_in_flight": 5}), probe=None)
    assert [one.max_in_flight for one in bench.cluster.endpoints] == [5, 5]


def test_a_new_endpoint_serves_at_once(make_cluster: MakeCluster) -> None:
    """In the order of the configuration."""
    bench = make_cluster("b")
    bench.cluster.apply_endpoints(configs("a", "b"))
    assert [endpoint.id for endpoint in bench.cluster.endpoints] == ["a", "b"]
    assert bench.ids() == {"a", "b"}


def test_a_removed_endpoint_finishes_what_it_has(make_cluster: MakeCluster) -> None:
    """Nothing new goes there; with its last request its metric series go."""
    bench = make_cluster("a", "b")
    first, second = bench.picked(preferred=A), bench.picked(preferred=A)
    first.endpoint.metrics.count_request(200)
    bench.cluster.apply_endpoints(configs("b"))
    assert bench.ids() == {"b"}
    assert bench.picked(preferred=A).decision.preference == "unknown"
    assert [endpoint.id for endpoint in bench.cluster.members.departures.endpoints] == ["a"]
    assert bench.endpoint("b") in bench.cluster.endpoints
    assert first.endpoint.condition(bench.clock()) is Condition.DRAINING
    first.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert "kvproxy_requests_total" in bench.series("a")
    second.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert bench.cluster.members.departures.endpoints == []
    assert bench.series("a") == []
    assert bench.series("b") != []
    first.endpoint.metrics.count_request(200)
    assert bench.series("a") == []


def test_an_idle_endpoint_is_gone_at_once(make_cluster: MakeCluster) -> None:
    """With its series."""
    bench = make_cluster("a", "b")
    bench.cluster.apply_endpoints(configs("b"))
    assert bench.cluster.members.departures.endpoints == []
    assert bench.series("a") == []


def test_an_endpoint_that_comes_back_before_it_left_is_the_same(make_cluster: MakeCluster) -> None:
    """A discovery that flickers loses no count."""
    bench = make_cluster("a", "b")
    running = bench.picked(preferred=A)
    bench.cluster.apply_endpoints(configs("b"))
    bench.cluster.apply_endpoints(configs("a", "b"))
    assert bench.endpoint("a") is running.endpoint
    assert bench.cluster.members.departures.endpoints == []
    running.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert bench.ids() == {"a", "b"}
    assert bench.series("a") != []


def test_another_address_is_another_endpoint(make_cluster: MakeCluster) -> None:
    """Lessons about the old engine do not hold for the new one; its series start over."""
    bench = make_cluster("a", "b")
    running = bench.picked(preferred=A, facts=OverlapFacts(10))
    bench.cluster.apply_endpoints((MOVED, *configs("b")))
    assert bench.endpoint("a") is not running.endpoint
    assert bench.endpoint("a").load.in_flight == 0
    assert bench.sample("kvproxy_in_flight", cluster="c", endpoint="a") == 0
    running.settle(AttemptOutcome.FAILURE, bench.clock())
    assert running.endpoint.load.in_flight == 0
    assert bench.cluster.members.departures.endpoints == []
    assert bench.sample("kvproxy_in_flight", cluster="c", endpoint="a") == 0


def test_an_endpoint_that_moves_and_moves_back_starts_over(make_cluster: MakeCluster) -> None:
    """Its series belong to the new one, even while the old one still has requests."""
    bench = make_cluster("a")
    running = bench.picked()
    bench.cluster.apply_endpoints((MOVED,))
    bench.cluster.apply_endpoints(configs("a"))
    assert bench.endpoint("a") is not running.endpoint
    running.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert bench.sample("kvproxy_in_flight", cluster="c", endpoint="a") == 0
    assert bench.cluster.members.departures.endpoints == []


def test_a_bad_url_changes_nothing(make_cluster: MakeCluster) -> None:
    """All of an update or none of it."""
    bench = make_cluster("a", "b")
    before = bench.cluster.endpoints
    with pytest.raises(ValueError, match="http"):
        bench.cluster.apply_endpoints((*configs("c"), EndpointSettings(id="d", url="ftp://127.0.0.1")))
    assert bench.cluster.endpoints == before
    assert bench.ids() == {"a", "b"}


def test_an_operators_weight_outlives_updates(make_cluster: MakeCluster) -> None:
    """Until the endpoint leaves, or its source gives it another weight than before: the later word wins."""
    bench = make_cluster("a", "b")
    assert bench.cluster.operator.reweight_endpoint(A, 2)
    bench.cluster.apply_endpoints((*configs("a", labels={"rack": "7"}), *configs("b", weight=7)))
    assert (bench.endpoint("a").weight, bench.endpoint("b").weight) == (2, 7)
    bench.cluster.apply_endpoints((*configs("a", weight=5), *configs("b", weight=7)))
    assert bench.endpoint("a").weight == 5
    assert bench.cluster.operator.reweight_endpoint(A, 3)
    picks = [bench.picked().endpoint.id for _ in range(10)]
    assert picks.count(A) == 3
    bench.cluster.apply_endpoints(configs("b"))
    bench.cluster.apply_endpoints(configs("a", "b"))
    assert bench.endpoint("a").weight == 1
    assert not bench.cluster.operator.reweight_endpoint(EndpointId("nobody"), 2)


def test_draining_outlives_updates(make_cluster: MakeCluster) -> None:
    """A discovery's next answer does not undo an operator's word."""
    bench = make_cluster("a", "b")
    bench.cluster.operator.drain_endpoint(A)
    bench.cluster.apply_endpoints(configs("a", "b", weight=2))
    assert bench.endpoint("a").draining
    assert bench.ids() == {"b"}


def test_static_endpoints_win_over_discovered_ones(make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """One id, one endpoint; the loser is named in the log."""
    bench = make_cluster("a")
    with caplog.at_level(logging.WARNING):
        bench.cluster.members.apply_source("dns", (MOVED, *configs("b")))
    assert str(bench.cluster.endpoints[0].origin) == configs("a")[0].url
    assert bench.ids() == {"a", "b"}
    assert "endpoint a of dns is ignored" in caplog.text
    bench.cluster.apply_endpoints(())
    assert [str(endpoint.origin) for endpoint in bench.cluster.endpoints] == [MOVED.url, configs("b")[0].url]


def test_the_same_series_may_be_counted_again_after_removal(make_cluster: MakeCluster) -> None:
    """An id that returns later starts its counters from nothing."""
    bench = make_cluster("a", "b")
    for expected in (1, 1):
        metrics = bench.endpoint("a").metrics
        metrics.attempt_failure("connect_error")
        metrics.count_probe("ok")
        assert (
            bench.sample("kvproxy_attempt_failures_total", cluster="c", endpoint="a", reason="connect_error")
            == expected
        )
        bench.cluster.apply_endpoints(configs("b"))
        assert metrics.closed
        bench.cluster.apply_endpoints(configs("a", "b"))
