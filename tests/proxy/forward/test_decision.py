"""The decision header: short, in a stable order, whatever the size of the cluster."""

from __future__ import annotations

import random

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.policy import PRECISE, Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, HealthCheckSettings, PolicyName
from kvproxy.proxy.forward.headers import describe_decision
from tests.support.clock import FakeClock
from tests.support.decision import predicted_at
from tests.support.picks import pick_endpoint


def pick_of(clock: FakeClock, request: PickRequest, *, policy: PolicyName, endpoints: int) -> Pick:
    settings = ClusterSettings(
        policy=policy,
        endpoints=tuple(EndpointSettings(id=f"e{n}", url=f"http://127.0.0.1:{n + 1}") for n in range(endpoints)),
        health=HealthCheckSettings(active=False),
    )
    cluster = Cluster("c", settings, metrics=Metrics(), clock=clock, rng=random.Random(1))
    pick = pick_endpoint(cluster, request, clock())
    assert pick is not None
    return pick


def test_a_followed_preference_and_what_was_known(clock: FakeClock) -> None:
    """The largest match first, with its source."""
    facts = OverlapFacts(
        prompt_tokens=100,
        by_endpoint={
            EndpointId("e1"): Overlap(16),
            EndpointId("e0"): Overlap(32, ((Tier.HOST, 16),), source=PRECISE),
        },
    )
    request = PickRequest(facts=facts, preferred=EndpointId("e1"))
    pick = pick_of(clock, request, policy=PolicyName.ROUND_ROBIN, endpoints=2)
    assert describe_decision(pick.decision, facts) == (
        "policy=round_robin; reason=preferred; preference=followed; prompt_tokens=100; "
        "matched=e0:48/precise,e1:16/approximate"
    )


@pytest.mark.parametrize("went", ["a@0", "a@1", "10.0.0.1:8000"])
def test_predictions_at_ranks_and_addresses_can_be_read(clock: FakeClock, went: str) -> None:
    """As the tests of real engines do."""
    held = {"a": 16, "a@0": 704, "a@1": 32, "10.0.0.1:8000": 48}
    facts = OverlapFacts(prompt_tokens=786, by_endpoint={EndpointId(one): Overlap(held[one]) for one in held})
    pick = pick_of(clock, PickRequest(facts=facts), policy=PolicyName.RANDOM, endpoints=1)
    headers = {"x-kvproxy-endpoint": went, "x-kvproxy-decision": describe_decision(pick.decision, facts)}
    assert predicted_at(headers) == (held[went], "approximate")


def test_nothing_known(clock: FakeClock) -> None:
    """No facts, or facts about no endpoint."""
    pick = pick_of(clock, PickRequest(), policy=PolicyName.RANDOM, endpoints=1)
    assert describe_decision(pick.decision, None) == f"policy=random; reason={pick.decision.reason}"
    assert describe_decision(pick.decision, OverlapFacts(prompt_tokens=7)).endswith("prompt_tokens=7; matched=none")


def test_a_large_cluster_does_not_make_a_large_header(clock: FakeClock) -> None:
    """Eight costs and eight matches at most."""
    facts = OverlapFacts(prompt_tokens=500, by_endpoint={EndpointId(f"e{n}"): Overlap(n) for n in range(200)})
    pick = pick_of(clock, PickRequest(facts=facts), policy=PolicyName.KV_AWARE, endpoints=200)
    text = describe_decision(pick.decision, facts)
    assert text.count("/approximate") == 8
    assert text.partition("costs=")[2].count(",") == 7
    assert len(text) < 400
