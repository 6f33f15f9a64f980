"""Picking: screening, preference, reservation, and what outcomes teach."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.endpoint import Condition
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.policy import Candidate, Choice, Overlap, OverlapFacts, PickRequest, Policy
from kvproxy.cluster.routing.work import Features
from kvproxy.cluster.screening import Refusal
from kvproxy.cluster.settings import ClusterSettings
from tests.cluster.conftest import MakeCluster, configs

A, B, C = EndpointId("a"), EndpointId("b"), EndpointId("c")
FAILURE, SUCCESS, CANCELLED = AttemptOutcome.FAILURE, AttemptOutcome.SUCCESS, AttemptOutcome.CANCELLED


def test_a_burst_in_one_turn_spreads(make_cluster: MakeCluster) -> None:
    """The reservation is made in the same step as the pick, so requests do not herd onto one that looked idle."""
    bench = make_cluster("a", "b", "c", "d", policy="least_request")
    burst = Counter(bench.picked().endpoint.id for _ in range(100))
    assert set(burst.values()) == {25}


def test_a_pick_counts_its_tokens_by_what_its_endpoint_holds(make_cluster: MakeCluster) -> None:
    """Uncached tokens are pending until the first token; all are resident until the end."""
    bench = make_cluster("a", "b")
    facts = OverlapFacts(1000, {A: Overlap(600, ((Tier.HOST, 100),))})
    pick = bench.picked(preferred=A, facts=facts)
    load = pick.endpoint.load
    assert (load.in_flight, load.pending_tokens, load.resident_tokens) == (1, 300, 1000)
    assert pick.reservation.lower == ((Tier.HOST, 100),)
    pick.first_token(bench.clock())
    assert (load.in_flight, load.pending_tokens, load.resident_tokens) == (1, 0, 1000)
    pick.settle(SUCCESS, bench.clock())
    assert (load.in_flight, load.pending_tokens, load.resident_tokens) == (0, 0, 0)
    other = bench.picked(preferred=B, facts=facts)
    assert (other.reservation.uncached_tokens, other.reservation.cached_tokens) == (1000, 0)


def test_facts_never_exceed_the_prompt(make_cluster: MakeCluster) -> None:
    """A source that claims more than the prompt has does not make negative work."""
    bench = make_cluster("a")
    reservation = bench.picked(facts=OverlapFacts(100, {A: Overlap(80, ((Tier.HOST, 500),))})).reservation
    assert (reservation.uncached_tokens, reservation.cached_tokens, reservation.lower) == (0, 100, ((Tier.HOST, 20),))


def test_settling_twice_counts_once(make_cluster: MakeCluster) -> None:
    """The first outcome stands."""
    bench = make_cluster("a", "b", health={"eject_after": 1})
    pick = bench.picked(preferred=A)
    pick.settle(CANCELLED, bench.clock())
    pick.settle(FAILURE, bench.clock())
    assert pick.endpoint.load.in_flight == 0
    assert pick.endpoint.condition(bench.clock()) is Condition.UP


@pytest.mark.parametrize(
    ("outcome", "condition"),
    [
        (AttemptOutcome.SUCCESS, Condition.UP),
        (AttemptOutcome.CLIENT_ERROR, Condition.UP),
        (AttemptOutcome.BUSY, Condition.UP),
        (AttemptOutcome.CANCELLED, Condition.UP),
        (AttemptOutcome.FAILURE, Condition.EJECTED),
    ],
)
def test_only_failures_take_an_endpoint_out(
    make_cluster: MakeCluster, outcome: AttemptOutcome, condition: Condition
) -> None:
    """Never 4xx, never a client that leaves, never an engine that says it is busy."""
    bench = make_cluster("a", "b", health={"eject_after": 3})
    bench.outcomes("a", outcome, times=3)
    assert bench.endpoint("a").condition(bench.clock()) is condition
    assert bench.ids() == ({"b"} if condition is Condition.EJECTED else {"a", "b"})


def test_an_ejected_endpoint_comes_back_by_time_alone(make_cluster: MakeCluster) -> None:
    """Nothing has to happen for the screening to notice."""
    bench = make_cluster("a", "b", health={"eject_after": 1, "eject_for": 10})
    bench.outcomes("a", FAILURE)
    assert bench.sample("kvproxy_ejections_total", cluster="c", endpoint="a", reason="failures") == 1
    bench.clock.advance(9.9)
    assert bench.ids() == {"b"}
    bench.clock.advance(0.1)
    assert bench.ids() == {"a", "b"}


@pytest.mark.parametrize(("count", "share", "ejectable"), [(1, 0.5, 1), (2, 0.5, 1), (4, 0.5, 2), (4, 0, 1), (5, 1, 5)])
def test_ejection_takes_out_a_share_at_most(
    make_cluster: MakeCluster, count: int, share: float, ejectable: int
) -> None:
    """But one endpoint may always be ejected."""
    names = "abcde"[:count]
    bench = make_cluster(*names, health={"eject_after": 1, "max_ejected": share}, breaker={"failure_threshold": 99})
    for name in names:
        bench.outcomes(name, FAILURE, times=2)
    now = bench.clock()
    assert sum(e.condition(now) is Condition.EJECTED for e in bench.cluster.endpoints) == ejectable


def test_a_breaker_opens_and_lets_probes_through(make_cluster: MakeCluster) -> None:
    """While half open only its probe slots are used, and one that answers closes it."""
    bench = make_cluster(
        "a",
        "b",
        health={"eject_after": 0},
        breaker={"failure_threshold": 3, "recovery_timeout": 10},
    )
    bench.outcomes("a", FAILURE, times=3)
    assert bench.endpoint("a").condition(bench.clock()) is Condition.BREAKER_OPEN
    assert bench.sample("kvproxy_ejections_total", cluster="c", endpoint="a", reason="breaker_open") == 1
    assert bench.sample("kvproxy_breaker_open", breaker="c/a") == 1
    assert bench.ids() == {"b"}
    bench.clock.advance(10)
    probe, second = bench.picked(preferred=A), bench.picked(preferred=A)
    assert (probe.endpoint.id, second.endpoint.id) == (A, A)
    assert bench.picked(preferred=A).endpoint.id == B
    probe.first_token(bench.clock())  # a stream that goes on for minutes closes it with its first token
    assert bench.ids() == {"a", "b"}
    assert bench.sample("kvproxy_breaker_open", breaker="c/a") == 0


def test_a_cancelled_probe_request_frees_its_slot(make_cluster: MakeCluster) -> None:
    """Otherwise a client that leaves would keep the endpoint out for ever."""
    bench = make_cluster(
        "a",
        "b",
        health={"eject_after": 0},
        breaker={"failure_threshold": 1, "recovery_timeout": 10},
    )
    bench.outcomes("a", FAILURE)
    bench.clock.advance(10)
    for _ in range(3):
        bench.outcomes("a", CANCELLED, times=2)


def test_excluded_endpoints_are_not_tried_again(make_cluster: MakeCluster) -> None:
    """A retry goes elsewhere; when all were tried there is no pick."""
    bench = make_cluster("a", "b")
    assert {bench.picked(excluded=frozenset({A})).endpoint.id for _ in range(4)} == {B}
    assert bench.pick(excluded=frozenset({A, B})) is None


def test_saturated_endpoints_are_passed_over(make_cluster: MakeCluster) -> None:
    """With `max_in_flight` requests there an endpoint takes no more until one ends."""
    bench = make_cluster("a", "b", max_in_flight=2)
    picks = [bench.picked() for _ in range(4)]
    assert bench.endpoint("a").condition(bench.clock()) is Condition.SATURATED
    assert bench.pick() is None
    assert bench.sample("kvproxy_endpoint_up", cluster="c", endpoint="a") == 1
    picks[0].settle(SUCCESS, bench.clock())
    assert bench.picked().endpoint is picks[0].endpoint


def test_draining_endpoints_get_nothing_new(make_cluster: MakeCluster) -> None:
    """Their running requests go on."""
    bench = make_cluster("a", "b")
    running = bench.picked(preferred=A)
    assert bench.cluster.operator.drain_endpoint(A)
    assert bench.ids() == {"b"}
    assert running.endpoint.load.in_flight == 1
    assert bench.cluster.operator.drain_endpoint(A, draining=False)
    assert bench.ids() == {"a", "b"}
    assert not bench.cluster.operator.drain_endpoint(EndpointId("nobody"))


def test_models_are_screened(make_cluster: MakeCluster) -> None:
    """An endpoint that declares models serves those; one that declares none serves any; "" is any model."""
    endpoints = (*configs("a", models=("x", "y")), *configs("b", models=("x",)), *configs("c"))
    bench = make_cluster(endpoints=endpoints)

    def served_by(model: str) -> set[str]:
        return {str(bench.picked(model=model).endpoint.id) for _ in range(6)}

    assert served_by("x") == {"a", "b", "c"}
    assert served_by("y") == {"a", "c"}
    assert served_by("z") == {"c"}
    assert served_by("") == {"a", "b", "c"}
    assert bench.cluster.screening.declared == {"x", "y"}


def test_models_from_clients_are_not_remembered(make_cluster: MakeCluster) -> None:
    """A client that makes names up does not grow the memory."""
    bench = make_cluster(endpoints=(*configs("a", models=("x",)), *configs("b")))
    for number in range(1000):
        assert bench.picked(model=f"m{number}").endpoint.id == B
    assert len(bench.cluster.screening._pools) <= 3


def preferred_result(bench: Any, **request: Any) -> str | None:
    pick = bench.picked(preferred=A, **request)
    followed = pick.endpoint.id == A
    assert followed is (pick.decision.preference == "followed")
    assert (pick.decision.reason == "preferred") is followed
    assert bench.sample("kvproxy_preferences_total", result=pick.decision.preference) == 1
    return str(pick.decision.preference)


@pytest.mark.parametrize(
    "case",
    ["followed", "unknown", "unhealthy", "ejected", "draining", "saturated", "excluded", "breaker_open", "model"],
)
def test_a_preference_is_soft_and_its_fate_counted(make_cluster: MakeCluster, case: str) -> None:
    """A preferred endpoint that may not serve is passed over, and the reason is a label."""
    endpoints = configs("b") if case == "unknown" else (*configs("a", models=("x",)), *configs("b"))
    bench = make_cluster(
        endpoints=endpoints,
        max_in_flight=1 if case == "saturated" else 0,
        health={"eject_after": 1 if case == "ejected" else 0},
        breaker={"failure_threshold": 1 if case == "breaker_open" else 9},
    )
    if case in ("ejected", "breaker_open"):
        pick = bench.picked()
        assert pick.endpoint.id == A
        pick.settle(FAILURE, bench.clock())
    elif case == "unhealthy":
        bench.endpoint("a").health.record_probe(False, bench.clock())
        bench.cluster.screening.invalidate(bench.endpoint("a"))
    elif case == "draining":
        bench.cluster.operator.drain_endpoint(A)
    elif case == "saturated":
        assert bench.picked().endpoint.id == A
    expected = {"ejected": "unhealthy", "model": "unknown"}.get(case, case)
    request = {"excluded": {"excluded": frozenset({A})}, "model": {"model": "other"}}.get(case, {})
    assert preferred_result(bench, **request) == expected


def test_panic_when_nobody_is_well(make_cluster: MakeCluster) -> None:
    """Verdicts that condemn every endpoint are not believed: all but draining endpoints serve again, and it counts."""
    bench = make_cluster("a", "b", "c", health={"eject_after": 0}, breaker={"failure_threshold": 1})
    bench.cluster.operator.drain_endpoint(C)
    bench.outcomes("a", FAILURE)
    bench.outcomes("b", FAILURE)
    picks = [bench.picked() for _ in range(4)]
    assert {pick.endpoint.id for pick in picks} == {A, B}
    assert {pick.decision.reason for pick in picks} == {"panic"}
    assert bench.sample("kvproxy_picks_total", cluster="c", policy="round_robin", reason="panic") == 4
    assert bench.picked(excluded=frozenset({A})).endpoint.id == B
    for pick in picks:
        pick.settle(SUCCESS, bench.clock())  # tells an open breaker nothing
    assert bench.endpoint("a").condition(bench.clock()) is Condition.BREAKER_OPEN


def test_an_engine_that_sleeps_is_no_candidate(make_cluster: MakeCluster) -> None:
    """Not even in panic while another is left; where all of them sleep, one may have been woken since."""
    bench = make_cluster("a", "b", health={"eject_after": 1, "max_ejected": 1})
    first, second = bench.endpoint("a"), bench.endpoint("b")
    first.asleep = True
    assert first.condition(bench.clock()) is Condition.ASLEEP
    assert bench.ids() == {"b"}
    assert preferred_result(bench) == "asleep"
    bench.outcomes("b", FAILURE)
    assert bench.ids() == {"b"}
    second.asleep = True
    assert bench.ids() == {"a", "b"}
    first.asleep = False
    assert bench.ids() == {"a"}


def test_panic_ends_with_the_first_endpoint_that_is_well(make_cluster: MakeCluster) -> None:
    """Then only that one serves."""
    bench = make_cluster("a", "b", health={"eject_after": 1, "eject_for": 10, "max_ejected": 1})
    bench.outcomes("a", FAILURE)
    bench.clock.advance(5)
    bench.outcomes("b", FAILURE)
    assert bench.ids() == {"a", "b"}
    bench.clock.advance(5)
    assert bench.ids() == {"a"}


def test_panic_follows_a_preference(make_cluster: MakeCluster) -> None:
    """All are equally unwell, and one of them has the cache."""
    bench = make_cluster("a", "b", health={"eject_after": 1, "max_ejected": 1})
    bench.outcomes("b", FAILURE)
    bench.outcomes("a", FAILURE)
    picks = [bench.picked(preferred=B) for _ in range(3)]
    assert {(pick.endpoint.id, pick.decision.reason, pick.decision.preference) for pick in picks} == {
        (B, "panic", "followed")
    }


def test_panic_is_not_for_the_saturated(make_cluster: MakeCluster) -> None:
    """One that is well but full is no outage; and in panic the bound on requests still holds."""
    bench = make_cluster("a", "b", max_in_flight=1, health={"eject_after": 1, "max_ejected": 1})
    bench.outcomes("b", FAILURE)
    bench.picked(preferred=A)
    assert bench.pick() is None
    assert bench.cluster.decide(PickRequest(), now=bench.clock()) is Refusal.SATURATED


def test_panic_fills_no_endpoint_beyond_its_bound(make_cluster: MakeCluster) -> None:
    """With all of them out each takes what it may hold, and no more."""
    bench = make_cluster("a", "b", max_in_flight=2, health={"eject_after": 1, "max_ejected": 1})
    bench.outcomes("a", FAILURE)
    bench.outcomes("b", FAILURE)
    assert {bench.picked().decision.reason for _ in range(4)} == {"panic"}
    assert bench.pick() is None


@pytest.mark.parametrize(
    ("refusal", "request_"),
    [
        (Refusal.NO_ENDPOINTS, PickRequest()),
        (Refusal.MODEL_NOT_SERVED, PickRequest(model="other")),
        (Refusal.DRAINING, PickRequest()),
        (Refusal.ALL_TRIED, PickRequest(excluded=frozenset({A}))),
        (Refusal.SATURATED, PickRequest()),
    ],
)
def test_a_refusal_has_its_reason(make_cluster: MakeCluster, refusal: Refusal, request_: PickRequest) -> None:
    """So that the client's error says what is wrong."""
    endpoints = () if refusal is Refusal.NO_ENDPOINTS else configs("a", models=("x",))
    bench = make_cluster(endpoints=endpoints, max_in_flight=1)
    if refusal is Refusal.DRAINING:
        bench.cluster.operator.drain_endpoint(A)
    elif refusal is Refusal.SATURATED:
        bench.picked()
    assert bench.cluster.decide(request_, now=bench.clock()) is refusal


class Learning(Policy):
    """A policy that notes what it is taught."""

    def __init__(self) -> None:
        super().__init__(rng=random.Random(1))
        self.heard: list[tuple[Any, ...]] = []

    def choose(self, request: PickRequest, candidates: Any, now: float) -> Choice:
        first: Candidate = candidates[0]
        return Choice(0, "first", [float(first.load.in_flight)])

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float, **_: object) -> None:
        self.heard.append(("sample", endpoint, work[1], busy_s))

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        self.heard.append(("reuse", endpoint, predicted_tokens, cached_tokens))

    def forget(self, endpoint: EndpointId) -> None:
        self.heard.append(("forget", endpoint))


def test_a_learning_policy_is_taught(make_cluster: MakeCluster) -> None:
    """Samples of the load ledger, the engines' own count of cached tokens, and left clients; costs are handed on."""
    policy = Learning()
    bench = make_cluster("a", with_={"policy": policy})
    pick = bench.picked(facts=OverlapFacts(1000, {A: Overlap(600)}))
    assert (pick.decision.reason, list(pick.decision.costs)) == ("first", [0.0])
    bench.clock.advance(2)
    pick.first_token(bench.clock())
    pick.observe_reuse(512, bench.clock())
    pick.settle(SUCCESS, bench.clock())
    bench.cluster.apply_endpoints(())
    pick.observe_reuse(512, bench.clock())  # too late: it is forgotten
    assert policy.heard == [("sample", A, 400.0, 2.0), ("reuse", A, 600, 512), ("forget", A)]


def test_other_policies_hear_nothing_of_reuse(make_cluster: MakeCluster) -> None:
    """Telling them is harmless."""
    bench = make_cluster("a")
    pick = bench.picked()
    pick.observe_reuse(5, bench.clock())
    assert pick.decision.policy == "round_robin"
    assert repr(pick) == "<Pick a round_robin>"


def test_counts_are_metrics(make_cluster: MakeCluster) -> None:
    """Gauges are read at scrape time, so they cost a request nothing."""
    bench = make_cluster("a", "b")
    bench.picked(preferred=A, facts=OverlapFacts(700))
    assert bench.sample("kvproxy_in_flight", cluster="c", endpoint="a") == 1
    assert bench.sample("kvproxy_pending_prompt_tokens", cluster="c", endpoint="a") == 700
    assert bench.sample("kvproxy_endpoint_up", cluster="c", endpoint="a") == 1
    bench.cluster.operator.drain_endpoint(A)
    assert bench.sample("kvproxy_endpoint_up", cluster="c", endpoint="a") == 0


def test_status_shows_no_secret(make_cluster: MakeCluster) -> None:
    """Neither do reprs."""
    key = "sk-very-secret"
    bench = make_cluster(endpoints=configs("a", api_key=key, labels={"rack": "7"}))
    endpoint = bench.endpoint("a")
    assert endpoint.authorization == b"Bearer sk-very-secret"
    shown = f"{endpoint!r} {endpoint.status(bench.clock())} {bench.cluster!r}"
    assert key not in shown
    assert endpoint.status(bench.clock())["labels"] == {"rack": "7"}
    assert endpoint.instance_id == "a"
    assert isinstance(bench.cluster.settings, ClusterSettings)
