"""The one decision: exclusion, preference, policy; and what asking changes: nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing import selector
from kvproxy.cluster.routing.kv_aware import LARGE
from kvproxy.cluster.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.cluster.routing.registry import make_policy, policy_types
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import features_of
from kvproxy.cluster.settings import PolicyName
from kvproxy.operate.config.verify import FORECASTING
from tests.cluster.routing.fleet import ask, fleet, occupy, place

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


@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.parametrize("name", policy_types())
def test_choosing_changes_nothing(name: PolicyName, count: int) -> None:
    """Of two worlds alike, one is asked again and again in between: it decides as the other does, at the same costs."""
    rng = Random(1)
    worlds = [(make_policy(name, rng=rng), tuple(fleet(count))) for _ in range(2)]
    for step in range(40):
        request, now, decided = ask(3000, {f"e{step % count}": 2000, "e1": 100}, hot=step), 7.0 * step, []
        for policy, candidates in worlds:
            rng.seed(step)
            if policy is worlds[0][0]:
                for later in (0.0, 0.01, 5.0):
                    policy.choose(ask(50 * step, {"e2": 40}), candidates, now + later - 5.0)
                rng.seed(step)
            choice = place(policy, request, candidates, now)
            load = candidates[choice.index].load
            load.reserve(500, 0, now, hidden=step % 3 > 0)
            policy.observe_sample(candidates[choice.index].id, features_of(700, 100), 0.2 + 0.01 * step, now)
            decided.append((choice.index, choice.reason, list(choice.costs)))
            decided.append(policy.estimates(now))
            decided.append([(one.load.pending_requests, one.load.pending_tokens) for one in candidates])
        assert decided[:3] == decided[3:]


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
    policy = make_policy(PolicyName.KV_AWARE, rng=Random(1))
    assert policy.choose(ask(100), candidates, 60.0).index == 0


@pytest.mark.parametrize("name", policy_types())
def test_every_policy_is_declared(name: PolicyName) -> None:
    """The declarations of a policy's name hold for its objects: speeds, parameters, reasons with a meaning."""
    kind, policy = policy_types()[name], make_policy(name, rng=Random(1))
    assert (policy.speeds is not None) == kind.learns_speeds
    assert policy.choose(ask(100), fleet(2), 0.0).reason in kind.reasons


def test_a_reason_means_one_thing() -> None:
    """Policies that share a reason share its meaning: receipts explain it by its name alone."""
    meanings: dict[str, str] = dict(selector.REASONS)
    for kind in policy_types().values():
        for reason, meaning in kind.reasons.items():
            assert meanings.setdefault(reason, meaning) == meaning


def test_the_configuration_knows_which_policies_learn_speeds() -> None:
    """It stands below the policies and cannot ask them, so its own list must agree with the classes."""
    assert {name for name, kind in policy_types().items() if kind.learns_speeds} == FORECASTING & policy_types().keys()
