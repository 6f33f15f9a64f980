"""Policies a client may ask for: one ledger, one set of learned speeds, counts of their own."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts, Policy
from kvproxy.cluster.routing.work import features_of
from kvproxy.cluster.settings import PolicyName
from tests.cluster.conftest import GREEDY, Bench, Greedy, MakeCluster, configs

A, B = EndpointId("a"), EndpointId("b")


def policy(bench: Bench, name: str) -> Policy:
    """Return the policy of this name."""
    return bench.cluster.policies.named[name].policy


def test_the_named_policy_decides_by_the_same_loads(make_cluster: MakeCluster) -> None:
    """Requests placed by one are load to the other."""
    bench = make_cluster("a", "b", policy="round_robin", client_policies=["least_request"])
    first = bench.picked()
    by_load = bench.picked(policy="least_request")
    assert by_load.endpoint.id != first.endpoint.id
    assert (first.decision.policy, by_load.decision.policy) == ("round_robin", "least_request")
    for one in (first, by_load):
        one.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert [endpoint.load.in_flight for endpoint in bench.cluster.endpoints] == [0, 0]


def test_each_is_counted_under_its_own_name(make_cluster: MakeCluster) -> None:
    """A closed set: what is not on offer is the cluster's own."""
    bench = make_cluster("a", policy="round_robin", client_policies=["random"])
    for name in ("", "random", "random", "kv_aware", "x" * 100):
        bench.picked(policy=name)
    counted = {
        sample.labels["policy"]: sample.value
        for metric in bench.metrics.registry.collect() if metric.name == "kvproxy_picks"
        for sample in metric.samples if sample.name == "kvproxy_picks_total"
    }  # fmt: skip
    assert counted == {"round_robin": 3.0, "random": 2.0}


def test_nobody_is_offered_anything_unless_it_is_configured(make_cluster: MakeCluster) -> None:
    """The name in a request means nothing then."""
    bench = make_cluster("a", policy="round_robin")
    assert not bench.cluster.policies.named
    assert bench.picked(policy="random").decision.policy == "round_robin"


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("own", ["kv_aware", GREEDY, "round_robin"])
def test_learned_speeds_are_shared_and_learned_once(make_cluster: MakeCluster, own: str) -> None:
    """One model for all that go by speeds, told of each sample once, whichever policy placed the request."""
    bench = make_cluster("a", "b", policy=own, client_policies=["kv_aware", GREEDY, "random"])
    first, second = policy(bench, "kv_aware"), policy(bench, GREEDY)
    assert isinstance(first, KvAware)
    assert isinstance(second, Greedy)
    assert first.speeds is second.speeds is bench.cluster.speeds
    bench.endpoint("a").load.on_sample(features_of(8000, 0), 2.0, bench.clock())  # type: ignore[misc]
    assert first.speeds.estimates(bench.clock()).samples == 1
    bench.cluster.operator.remove_endpoint(A)
    assert not first.speeds.estimates(bench.clock()).slowness


def test_utilisation_counts_what_others_place(make_cluster: MakeCluster) -> None:
    """Once a request, whichever policy placed it; the estimated utilisation would be that of an idle pool otherwise."""
    facts = OverlapFacts(5_000, {A: Overlap(100)})

    def rho_after(*named: str) -> float:
        bench = make_cluster("a", "b", policy="kv_aware", client_policies=["round_robin"])
        for name in named:
            bench.picked(policy=name, facts=facts)
        aware = bench.cluster.policies.own.policy
        assert isinstance(aware, KvAware)
        return aware.utilisation.estimate_rates(bench.clock())[0]

    assert rho_after("round_robin", "round_robin") > rho_after("round_robin") > rho_after()
    assert rho_after("") == pytest.approx(rho_after("round_robin"), rel=1e-6)


def changed(bench: Bench, **changes: Any) -> None:
    """Other settings while it runs."""
    settings = type(bench.cluster.settings).model_validate({**bench.cluster.settings.model_dump(), **changes})
    bench.cluster.reconfigure(settings, probe=None)


@pytest.mark.usefixtures("greedy")
def test_a_reload_changes_the_offer_and_keeps_what_was_learned(make_cluster: MakeCluster) -> None:
    """The same list stays as it is; a new one goes on with the speeds known."""
    bench = make_cluster("a", "b", policy="kv_aware", client_policies=["round_robin"])
    bench.endpoint("a").load.on_sample(features_of(8000, 0), 2.0, bench.clock())  # type: ignore[misc]
    before = policy(bench, "round_robin")
    changed(bench, max_in_flight=9)
    assert policy(bench, "round_robin") is before
    changed(bench, client_policies=[GREEDY])
    assert bench.picked(policy="round_robin").decision.policy == "kv_aware"
    assert policy(bench, GREEDY).speeds is bench.cluster.speeds
    changed(bench, policy="least_request")
    speeds = policy(bench, GREEDY).speeds
    assert speeds is not None
    assert speeds.estimates(bench.clock()).samples == 1
    changed(bench, client_policies=[])
    assert not bench.cluster.policies.named


def test_the_clusters_own_policy_may_be_listed_too(make_cluster: MakeCluster) -> None:
    """It is the same object."""
    own = PolicyName.KV_AWARE
    bench = make_cluster(endpoints=configs("a"), policy=own, client_policies=[own, PolicyName.RANDOM])
    assert policy(bench, "kv_aware") is bench.cluster.policies.own.policy


@pytest.mark.usefixtures("greedy")
def test_departed_endpoints_are_forgotten_by_policies_that_share_speeds(make_cluster: MakeCluster) -> None:
    """Speeds are shared; requests that keep coming to an endpoint each policy counts itself."""
    bench = make_cluster("a", "b", policy=GREEDY, client_policies=["kv_aware"])
    bench.picked(policy="kv_aware").settle(AttemptOutcome.SUCCESS, bench.clock())
    named = policy(bench, "kv_aware")
    assert isinstance(named, KvAware)
    assert set(named.arrivals.known()) == {A, B}
    bench.cluster.apply_endpoints(configs("b"))
    assert set(named.arrivals.known()) == {B}
