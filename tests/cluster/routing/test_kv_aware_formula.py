"""kv_aware computes its costs by columns and remembers parts of them; the plain formula gives the same, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.routing.kv_aware import (
    LARGE,
    LATE_COST,
    LATE_FROM,
    LATE_SLACK_S,
    MAX_DELAYED,
    MAX_STALLED,
    MAX_UNEVEN,
    TICK_S,
    CostWeights,
    KvAware,
)
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.work import features_of
from tests.cluster.routing.fleet import FakeCandidate, place


def plain_wait_s(load: EndpointLoad, policy: KvAware, slowness: float, now: float) -> float:
    """Without what a ledger remembers of its latest answer."""
    return load.backlog(policy.speeds.seconds, slowness, now).wait_s(policy.speeds.seconds, slowness)


def plain_costs(
    policy: KvAware, facts: OverlapFacts, candidates: Sequence[FakeCandidate], now: float
) -> Sequence[float]:
    """Return the formula of kv_aware's docstring, one endpoint after the other."""
    weights, prompt, hot = CostWeights(), facts.prompt_tokens, min(facts.hot_tokens, facts.prompt_tokens)
    request_s, token_s, attention_s, _ = policy.speeds.seconds
    rho, arrivals_per_s = policy.utilisation.estimate_rates(now)
    congestion = weights.congestion * arrivals_per_s / (1.0 - rho)
    slowness = [policy.speeds.slowness(one.id, now) for one in candidates]
    waits = [plain_wait_s(one.load, policy, slow, now) for one, slow in zip(candidates, slowness, strict=True)]
    arrivals = policy.arrivals.estimate([one.id for one in candidates], waits, now)
    fewest = min(one.load.in_flight for one in candidates)
    everywhere = min(MAX_DELAYED, congestion * sum(waits) / len(waits))
    costs = []
    firsts = []
    owns = []
    for one, slow, wait, past in zip(candidates, slowness, waits, arrivals, strict=True):
        overlap = facts.by_endpoint.get(one.id, Overlap(0))
        matched = min(overlap.device_tokens + overlap.lower_tokens, prompt)
        uncached = prompt - matched
        own = request_s + uncached * (token_s + attention_s * (matched + 0.5 * uncached))
        if hot > matched:
            own *= 1.0 - (1.0 - weights.hot_discount) * (hot - matched) / uncached
        if overlap.lower:
            price_s = policy.speeds.onboarding.seconds_per_token(one.id, Tier.HOST, token_s)
            own += price_s * max(0, min(overlap.lower_tokens, prompt - overlap.device_tokens))
        delay = everywhere + min(MAX_DELAYED, weights.crowding * past.bound_per_s * (wait + 0.5 * slow * own))
        stalled = min(fewest, MAX_STALLED) + min(one.load.in_flight - fewest, max(MAX_UNEVEN, MAX_STALLED - fewest))
        cost = wait + own * (slow + weights.stall * stalled)
        costs.append((cost + own * delay + weights.usual_waits * past.usual_wait_s) / one.weight)
        firsts.append((wait + own * slow) / one.weight)
        owns.append(own)
    for index, (own, first) in enumerate(zip(owns, firsts, strict=True)):
        soonest = min(first for other, first in zip(owns, firsts, strict=True) if other <= own)
        limit = LATE_FROM * soonest + LATE_SLACK_S
        if first > limit:
            costs[index] += LATE_COST * (first - limit)
    return costs


STEPS = st.lists(
    st.tuples(
        st.integers(0, 9000),  # tokens of the prompt
        st.integers(0, 9000),  # that one endpoint holds
        st.integers(0, 3000),  # of them on lower tiers
        st.integers(0, 9000),  # hot
        st.sampled_from([0.0, 0.001, 0.03, 1.0, 30.0]),  # seconds since the step before
        st.sampled_from(["token", "end", "hidden", "learn"]),
    ),
    max_size=25,
)


@pytest.mark.parametrize("count", [1, 2, 7])
@given(steps=STEPS)
def test_costs_are_those_of_the_plain_formula(count: int, steps: list[tuple[int, int, int, int, float, str]]) -> None:
    """Whatever was placed, finished and learned before."""
    policy = KvAware(rng=Random(1))
    candidates = tuple(FakeCandidate(EndpointId(f"e{i}"), weight=1.0 + 0.3 * i) for i in range(count))
    rng, now, live = Random(2), 0.0, []
    for prompt, held, lower, hot, pause_s, then in steps:
        now += pause_s
        below = ((Tier.HOST, lower),) if lower else ()
        overlaps = {EndpointId(f"e{rng.randrange(count)}"): Overlap(held, below), EndpointId("gone"): Overlap(7)}
        facts = OverlapFacts(prompt, overlaps, hot)
        expected = plain_costs(policy, facts, candidates, now)
        choice = place(policy, PickRequest(facts=facts), candidates, now)
        assert choice.costs == expected
        assert expected[choice.index] == min(expected)
        load = candidates[choice.index].load
        live.append((load, load.reserve(prompt, 0, now, hidden=then == "hidden")))
        if then == "token":
            rng.choice(live)[0].first_token(live[-1][1], now)
        elif then == "end":
            taken, reservation = live.pop(rng.randrange(len(live)))
            taken.release(reservation, now)
        elif then == "learn":
            policy.observe_sample(candidates[choice.index].id, features_of(prompt + 1, held), 0.5, now, lower=below)


def test_a_large_pool_goes_by_speeds_of_a_moment_ago() -> None:
    """For less than a tick after they were asked for; loads are always those of now."""
    policy = KvAware(rng=Random(1))
    candidates = tuple(FakeCandidate(EndpointId(f"e{i}")) for i in range(LARGE))
    facts = OverlapFacts(4000)
    before = place(policy, PickRequest(facts=facts), candidates, 10.0).costs
    policy.observe_sample(candidates[3].id, features_of(4000, 0), 9.0, 10.0)
    assert policy.choose(PickRequest(facts=facts), candidates, 10.0 + 0.9 * TICK_S).costs == pytest.approx(before)
    candidates[5].load.reserve(4000, 0, 10.0)
    now = policy.choose(PickRequest(facts=facts), candidates, 10.0 + 0.9 * TICK_S).costs
    assert now[5] > 1.5 * before[5]
    later = 10.0 + 1.1 * TICK_S
    assert policy.choose(PickRequest(facts=facts), candidates, later).costs == plain_costs(
        policy, facts, candidates, later
    )


@pytest.mark.parametrize("count", [2, LARGE])
def test_a_question_changes_no_later_decision(count: int) -> None:
    """Speeds and arrivals are remembered from placements alone, however many choices are only asked for."""
    candidates = tuple(FakeCandidate(EndpointId(f"e{i}")) for i in range(count))
    asked, silent = (KvAware(rng=Random(1)) for _ in range(2))
    facts = OverlapFacts(4000, {candidates[1].id: Overlap(3000)})
    for policy in (asked, silent):
        place(policy, PickRequest(facts=facts), candidates, 10.0)
        policy.observe_sample(candidates[0].id, features_of(4000, 0), 9.0, 10.03)
    candidates[1].load.reserve(9000, 0, 10.0)
    asked.choose(PickRequest(facts=facts), candidates, 10.03)  # after the speeds of the placement are out of date
    for policy in (asked, silent):
        policy.observe_sample(candidates[1].id, features_of(4000, 0), 0.1, 10.04)
    later = [policy.choose(PickRequest(facts=facts), candidates, 10.045).costs for policy in (asked, silent)]
    assert later[0] == later[1] == plain_costs(silent, facts, candidates, 10.045)
