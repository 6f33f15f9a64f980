"""The one decision: exclusion, preference, policy; and what asking changes: nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from kvproxy.config.cluster_schema import ClusterSettings, PolicyName
from kvproxy.routing import selector
from kvproxy.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.routing.registry import POLICIES, make_policy
from kvproxy.routing.speeds import SpeedModel
from kvproxy.types import EndpointId
from tests.routing.fleet import ask, fleet, occupy, place

A, B = EndpointId("e0"), EndpointId("e1")


class Last(Policy):
    """The last one, always."""

    reasons = {"last": "it is the last one"}

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        return Choice(len(candidates) - 1, "last", [1.0] * len(candidates))


@pytest.mark.parametrize(
    ("request_", "panic", "expected"),
    [
        (PickRequest(), False, ("e2", "last", None)),
        (PickRequest(), True, ("e2", "panic", None)),
        (PickRequest(preferred=A), False, ("e0", "preferred", "followed")),
        (PickRequest(preferred=A), True, ("e0", "panic", "followed")),
        (PickRequest(preferred=EndpointId("gone")), False, ("e2", "last", "unhealthy")),
        (PickRequest(preferred=A, excluded=frozenset({A})), False, ("e2", "last", "unhealthy")),
        (PickRequest(excluded=frozenset({EndpointId("e2")})), False, ("e1", "last", None)),
    ],
)
def test_the_decision_as_a_table(request_: PickRequest, panic: bool, expected: tuple[str, str, str | None]) -> None:
    """A preference that may serve is followed, else the policy chooses among what is not excluded."""
    policy = Last(rng=Random(1))
    decision = selector.decide(
        request_, fleet(3), policy, 0.0, name="last", panic=panic, why_skipped=lambda request, now: "unhealthy"
    )
    assert decision is not None
    assert (decision.endpoint.id, decision.reason, decision.preference) == expected
    assert (decision.policy, decision.decided_by) == ("last", policy)
    assert (decision.choice is None) == (expected[2] == "followed")
    assert list(decision.costs) == ([] if decision.choice is None else [1.0] * len(decision.candidates))


def test_without_candidates_there_is_no_decision() -> None:
    """Whether there were none, or all were tried."""
    policy = Last(rng=Random(1))
    assert selector.decide(PickRequest(), [], policy, 0.0) is None
    assert selector.decide(PickRequest(excluded=frozenset({A, B})), fleet(2), policy, 0.0) is None


@pytest.mark.parametrize("name", PolicyName)
def test_choosing_changes_nothing(name: PolicyName) -> None:
    """Whatever was placed and learned before: only draws of chance move on, and the loads stay as they are."""
    policy, candidates = make_policy(name, ClusterSettings(policy=name), rng=Random(1)), fleet(3)
    for candidate in candidates:
        candidate.load.reserve(500, 0, 0.0, hidden=True)
    for second in range(5):
        place(policy, ask(3000, {"e0": 2000}), candidates, float(second))
    policy.choose(ask(3000), candidates, 100.0)  # what is only remembered of the candidates is there by now
    before = state_of(policy), [state_of(one.load) for one in candidates]
    for second in range(101, 160, 7):
        policy.choose(ask(3000, {"e0": 2000, "e1": 100}), candidates, float(second))
    assert (state_of(policy), [state_of(one.load) for one in candidates]) == before


def state_of(thing: Any) -> object:
    """Everything it holds, deeply, but chance."""
    if isinstance(thing, Random) or callable(thing):
        return None
    if isinstance(thing, dict):
        return {repr(key): state_of(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [state_of(each) for each in thing]
    names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
    if not names or isinstance(thing, str | int | float):
        return copy.deepcopy(thing)
    return {name: state_of(getattr(thing, name)) for name in names}


def test_ledgers_are_brought_up_to_date_before_a_placement() -> None:
    """Hidden requests that are due are taken as prefilled, each by its endpoint's own speed."""
    candidates, speeds = fleet(2), SpeedModel()
    for candidate in candidates:
        candidate.load.reserve(8000, 0, 0.0, hidden=True)
    selector.advance(candidates, speeds, 0.5)
    assert [one.load.pending_requests for one in candidates] == [1, 1]
    selector.advance(candidates, speeds, 60.0)
    assert [one.load.pending_requests for one in candidates] == [0, 0]


def test_a_due_request_is_no_wait_to_a_decision() -> None:
    """The decision sees what the ledger will say once it is taken."""
    candidates = fleet(2)
    candidates[0].load.reserve(1000, 0, 0.0, hidden=True)
    occupy(candidates[1], uncached=10)
    policy = make_policy(PolicyName.LEAST_TTFT, ClusterSettings(), rng=Random(1))
    assert policy.choose(ask(100), candidates, 60.0).index == 0


@pytest.mark.parametrize("name", PolicyName)
def test_every_policy_is_declared(name: PolicyName) -> None:
    """What others ask of a policy's name holds for its objects: speeds, parameters, reasons with a meaning."""
    kind, policy = POLICIES[name], make_policy(name, ClusterSettings(policy=name), rng=Random(1))
    assert (policy.speeds is not None) == kind.learns_speeds
    assert policy.choose(ask(100), fleet(2), 0.0).reason in kind.reasons


def test_a_reason_means_one_thing() -> None:
    """Policies that share a reason share its meaning: receipts explain it by its name alone."""
    meanings: dict[str, str] = dict(selector.REASONS)
    for kind in POLICIES.values():
        for reason, meaning in kind.reasons.items():
            assert meanings.setdefault(reason, meaning) == meaning
