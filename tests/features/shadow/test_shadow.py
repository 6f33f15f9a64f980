"""A second policy that decides without effect."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Candidate, Choice, Overlap, OverlapFacts, PickRequest, Policy
from kvproxy.cluster.routing.work import IDLE, Features
from kvproxy.features.shadow import shadow
from kvproxy.features.shadow.shadow import MAX_ERRORS, Shadow
from tests.cluster.conftest import Bench, MakeCluster
from tests.support.clock import FakeClock

A, B = EndpointId("a"), EndpointId("b")
SPEEDS: Features = (0.01, 0.001, 0.0, 0.0)


def decisions(bench: Bench, policy: str, result: str) -> float:
    """How many ended so."""
    labels = {"cluster": "c", "policy": policy, "result": result}
    return bench.sample("kvproxy_shadow_decisions_total", **labels) or 0.0


class Faulty(Policy):
    """A policy that raises wherever it can."""

    def __init__(self, *, index: int | None = None) -> None:
        super().__init__(rng=random.Random(1))
        self.index = index
        self.calls = 0

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        self.calls += 1
        if self.index is None:
            raise ZeroDivisionError("broken policy")
        return Choice(self.index, "broken")

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float, **_: object) -> None:
        raise ZeroDivisionError("broken learner")

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        raise ZeroDivisionError("broken learner")

    def forget(self, endpoint: EndpointId) -> None:
        raise ZeroDivisionError("broken learner")


def shadowed(bench: Bench, policy: Faulty) -> Shadow:
    """Put that policy behind the cluster, in place of the shadow it has."""
    shade = Shadow(policy, name="faulty", cluster="c", metrics=bench.metrics)
    bench.cluster.policies._silent = (shade,)
    return shade


def shadow_of(bench: Bench) -> Shadow | None:
    """Return the shadow that the cluster's settings ask for."""
    found = next(iter(bench.cluster.policies.silent.values()), None)
    assert found is None or isinstance(found, Shadow)
    return found


def test_the_shadow_changes_nothing_and_its_differences_are_counted(make_cluster: MakeCluster) -> None:
    """Round robin goes on taking turns while kv_aware would follow the cache."""
    plain = make_cluster("a", "b")
    bench = make_cluster("a", "b", shadow_policy="kv_aware")
    facts = OverlapFacts(4000, {A: Overlap(4000)})
    went = []
    for each in (plain, bench):
        picks = [each.picked(facts=facts) for _ in range(6)]
        went.append([pick.endpoint.id for pick in picks])
        for pick in picks:
            pick.settle(AttemptOutcome.CANCELLED, each.clock())
    assert went[0] == went[1]
    different, same = decisions(bench, "kv_aware", "different"), decisions(bench, "kv_aware", "same")
    assert different + same == 6
    assert different >= 2
    labels = {"cluster": "c", "policy": "kv_aware"}
    assert bench.sample("kvproxy_shadow_cost_difference_count", by="shadow", **labels) == different
    assert (bench.sample("kvproxy_shadow_cost_difference_sum", by="shadow", **labels) or 0) > 0
    assert (
        bench.sample("kvproxy_shadow_cost_difference_count", by="live", **labels) is None
    )  # round robin knows no costs


def test_the_live_policy_judges_the_shadow_too(make_cluster: MakeCluster) -> None:
    """The cost of the shadow's choice by the live policy."""
    bench = make_cluster("a", "b", policy="kv_aware", shadow_policy="round_robin")
    for _ in range(4):
        bench.picked(facts=OverlapFacts(4000, {A: Overlap(4000)})).settle(AttemptOutcome.CANCELLED, bench.clock())
    assert decisions(bench, "round_robin", "different") == 2
    labels = {"cluster": "c", "policy": "round_robin", "by": "live"}
    assert (bench.sample("kvproxy_shadow_cost_difference_sum", **labels) or 0) > 0


def test_both_policies_learn_from_the_same_samples(make_cluster: MakeCluster) -> None:
    """Each in a state of its own; the speeds of a cluster whose policy learns none are its shadow's."""
    bench = make_cluster("a", policy="kv_aware", shadow_policy="least_ttft")
    lone = make_cluster("a", shadow_policy="least_ttft")
    for each in (bench, lone):
        pick = each.picked(facts=OverlapFacts(8000))
        each.clock.advance(4.0)
        pick.first_token(each.clock())
        pick.settle(AttemptOutcome.SUCCESS, each.clock())
        assert each.cluster.speeds is not None
        assert each.cluster.speeds.estimates(each.clock()).samples == 1
    shade = shadow_of(bench)
    assert shade is not None
    learned = shade.policy.speeds
    assert learned is not None
    assert learned is not bench.cluster.speeds
    assert learned.estimates(bench.clock()).samples == 1


def test_a_shadow_that_raises_reaches_no_request(make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, counted each time, and left alone after so many errors in a row."""
    bench = make_cluster("a", "b")
    policy = Faulty()
    shade = shadowed(bench, policy)
    with caplog.at_level(logging.ERROR):
        for _ in range(MAX_ERRORS + 5):
            assert bench.picked().endpoint.id in (A, B)
    assert policy.calls == MAX_ERRORS
    assert shade.given_up
    assert decisions(bench, "faulty", "error") == MAX_ERRORS
    assert [record.message for record in caplog.records] == [
        "shadow policy faulty of c cannot decide", "shadow policy faulty of c is off: it fails every time",
    ]  # fmt: skip
    assert caplog.records[0].exc_info is not None


def test_a_shadow_that_fails_now_and_then_goes_on(make_cluster: MakeCluster) -> None:
    """Only errors in a row end it."""
    bench = make_cluster("a", "b")
    policy = Faulty()
    shade = shadowed(bench, policy)
    for _ in range(3):
        policy.index = None
        for _ in range(MAX_ERRORS - 1):
            bench.picked()
        policy.index = 0
        bench.picked()
    assert not shade.given_up
    assert decisions(bench, "faulty", "error") == 3 * (MAX_ERRORS - 1)


def test_a_shadow_that_cannot_learn_reaches_no_request(make_cluster: MakeCluster) -> None:
    """Samples, reuse and leaving are guarded as decisions are."""
    bench = make_cluster("a", "b")
    shade = shadowed(bench, Faulty(index=0))
    pick = bench.picked()
    shade.learn(lambda policy: policy.observe_sample(A, (1.0, 1.0, 1.0, 0.0), 1.0, 0.0))
    pick.observe_reuse(5, bench.clock())
    pick.settle(AttemptOutcome.SUCCESS, bench.clock())
    bench.cluster.apply_endpoints(())
    assert decisions(bench, "faulty", "error") == 4  # a sample, a reuse, and two endpoints that left
    assert decisions(bench, "faulty", "same") + decisions(bench, "faulty", "different") == 1


def test_an_index_out_of_range_is_an_error(make_cluster: MakeCluster) -> None:
    """Not a difference of a cost that belongs to another request."""
    bench = make_cluster("a", "b")
    shadowed(bench, Faulty(index=-1))
    bench.picked()
    assert decisions(bench, "faulty", "error") == 1
    assert decisions(bench, "faulty", "different") == 0


def test_beyond_so_many_a_second_it_sits_out(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a shadow is bounded; it goes on in the next second."""
    monkeypatch.setattr(shadow, "MAX_DECISIONS_PER_S", 3)
    bench = make_cluster("a", shadow_policy="random")
    for _ in range(5):
        bench.picked()
    assert (decisions(bench, "random", "same"), decisions(bench, "random", "skipped")) == (3, 2)
    bench.clock.advance(1.0)
    bench.picked()
    assert decisions(bench, "random", "same") == 4


def test_a_question_leaves_the_ledger_as_it_is(clock: FakeClock) -> None:
    """A hidden request whose time has passed is left out of what is shown, and stays in the ledger."""
    load = EndpointLoad()
    load.reserve(1000, 0, clock(), hidden=True)
    load.reserve(500, 0, clock())
    assert load.wait_s(SPEEDS, 1.0, clock()) == pytest.approx(1.52)
    clock.advance(1.2)
    assert load.backlog(None, 1.0, clock()).work == load._work
    before = load.wait_s(SPEEDS, 1.0, clock())
    assert before == pytest.approx(0.51 - (1.2 - 1.01))
    assert (load.pending_requests, load.pending_tokens, load.resident_tokens) == (2, 1500, 1500)
    load.advance(SPEEDS, 1.0, clock())
    assert load.wait_s(SPEEDS, 1.0, clock()) == before
    assert (load.pending_requests, load.in_flight) == (1, 2)


def test_nothing_pending_is_no_wait(clock: FakeClock) -> None:
    """Whether nothing came, or all that came must be prefilled by now."""
    load = EndpointLoad()
    assert load.backlog(SPEEDS, 1.0, clock()) is IDLE
    assert IDLE.wait_s(SPEEDS, 1.0) == 0.0
    load.reserve(100, 0, clock(), hidden=True)
    assert load.backlog(SPEEDS, 1.0, clock()).work == load._work
    clock.advance(10.0)
    assert load.backlog(SPEEDS, 1.0, clock()) is IDLE
