"""The published policies decide as their sources say."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvproxy.base.types import Tier
from kvproxy.cluster.routing.load import count_live_blocks
from kvproxy.cluster.routing.policy import Overlap, PickRequest, Policy
from kvproxy.cluster.routing.registry import make_policy
from kvproxy.cluster.routing.simple import LeastRequest
from kvproxy.cluster.routing.work import features_of
from kvproxy.cluster.settings import PolicyName
from kvproxy.features.published.policies import (
    Dynamo,
    DynamoWeights,
    LeastTtft,
    LlmD,
    LlmDSticky,
    LlmDWeights,
    LMetric,
    PrefixAffinity,
)
from tests.cluster.routing.fleet import FakeCandidate, ask, decode, fleet, live, occupy


@pytest.mark.parametrize("name", PolicyName)
def test_every_name_makes_a_policy_that_chooses(name: PolicyName) -> None:
    """The registry covers the enum, and each policy picks one of its candidates without any facts."""
    policy, candidates = make_policy(name, rng=Random(1)), fleet(3)
    assert 0 <= policy.choose(ask(0), candidates, 0.0).index < 3


@pytest.mark.parametrize(
    "policy",
    [PrefixAffinity(rng=Random(1)), Dynamo(rng=Random(1)), LlmD(rng=Random(1)), LlmDSticky(rng=Random(1)),
     LMetric(rng=Random(1)), LeastTtft(rng=Random(1))],
    ids=lambda policy: type(policy).__name__,
)  # fmt: skip
def test_all_prefer_the_holder_of_an_idle_pair_and_spread_ties(policy: Policy) -> None:
    """Overlap wins when nothing else differs; without it requests do not herd."""
    candidates = fleet(2)
    assert policy.choose(ask(4000, {"e1": 3000}), candidates, 0.0).index == 1
    assert len({policy.choose(ask(4000), candidates, 0.0).index for _ in range(40)}) == 2


def test_prefix_affinity_gives_up_affinity_when_imbalanced() -> None:
    """More than 64 requests and a factor of 1.5 apart: the least loaded, whatever it holds."""
    candidates, policy = fleet(2), PrefixAffinity(rng=Random(1))
    occupy(candidates[0], times=64)
    assert policy.choose(ask(100, {"e0": 90}), candidates, 0.0).reason == "overlap"
    occupy(candidates[0])
    choice = policy.choose(ask(100, {"e0": 90}), candidates, 0.0)
    assert (choice.index, choice.reason) == (1, "imbalanced")


def test_prefix_affinity_spreads_by_weight_as_least_request_does() -> None:
    """Of two idle engines the one of weight 4 is less loaded by the request than that of weight 1."""
    candidates = fleet(2)
    candidates[1].weight = 4.0
    for policy in (PrefixAffinity(rng=Random(1)), LeastRequest(rng=Random(1))):
        assert {policy.choose(ask(100), candidates, 0.0).index for _ in range(20)} == {1}


def test_prefix_affinity_ignores_a_short_match() -> None:
    """A match of 0.3 of the prompt or less goes to the least loaded."""
    candidates, policy = fleet(2), PrefixAffinity(rng=Random(1))
    occupy(candidates[0])
    assert policy.choose(ask(100, {"e0": 30}), candidates, 0.0).index == 1
    assert policy.choose(ask(100, {"e0": 31}), candidates, 0.0).index == 0


def dynamo_costs(request: PickRequest, candidates: Sequence[FakeCandidate], **weights: float) -> Sequence[float]:
    """Return each candidate's cost, in blocks of 16 tokens."""
    for candidate in candidates:
        count_live_blocks(candidate.load, True)
    policy = Dynamo(rng=Random(1), weights=DynamoWeights(**weights))
    return policy.choose(request, candidates, 0.0).costs


def test_dynamo_counts_a_shared_live_block_once() -> None:
    """Its own worked example (prompt_registry.rs): 96, 64 and 33 blocks of this prompt are live, so wherever it goes 96
    will be; a request counted for itself would make them 192, 160 and 129."""
    prompt, candidates = range(1, 97), fleet(3)
    for candidate, length in zip(candidates, (96, 64, 33), strict=True):
        live(candidate, prompt[:length], times=3)
    costs = dynamo_costs(ask(96 * 16, blocks=prompt), candidates, prefill_load_scale=0.0)
    assert costs == [96.0, 96.0, 96.0]


def test_dynamo_adds_the_blocks_of_live_prompts_to_those_it_adds() -> None:
    """Blocks that other prompts share count once, and those not shared with this one are added."""
    candidates = fleet(2)
    live(candidates[0], [1, 2, 30, 31])
    live(candidates[0], [1, 2, 40])
    assert dynamo_costs(ask(64, blocks=[1, 2, 3, 4]), candidates, prefill_load_scale=0.0) == [7.0, 4.0]


def test_dynamo_scales_prefill_after_the_credit() -> None:
    """Its own worked example (default.rs): 2 of 4 blocks held, scale 2 and 3 blocks live cost 7, a cold one 8."""
    candidates = fleet(2)
    live(candidates[0], [7, 8, 9])
    assert dynamo_costs(ask(64, {"e0": 32}), candidates, prefill_load_scale=2.0) == [7.0, 8.0]


def test_dynamo_credit_above_one_can_prefer_the_holder() -> None:
    """Its own worked example: half of 8 blocks held where 5 are live; credit 1 leaves it dearer than a cold endpoint,
    1.5 makes it cheaper."""
    candidates = fleet(2)
    live(candidates[0], [1, 2, 3, 4, 5])
    assert dynamo_costs(ask(128, {"e0": 64}), candidates) == [9.0, 8.0]
    assert dynamo_costs(ask(128, {"e0": 64}), candidates, device_credit=1.5) == [7.0, 8.0]


def test_dynamo_never_credits_more_than_there_is_to_prefill() -> None:
    """Blocks held beyond that take nothing off the live ones: the rule of its test of the clamp."""
    candidates = fleet(1)
    live(candidates[0], [1, 2])
    assert dynamo_costs(ask(64, {"e0": 64}, blocks=[1, 2, 3, 4, 5]), candidates, device_credit=2.0) == [5.0]


def test_dynamo_can_charge_requests_in_flight() -> None:
    """Its own worked example: 100 live blocks and 4 requests cost 100, and 228 at a weight of 32."""
    candidates = fleet(1)
    live(candidates[0], range(100), times=4)
    assert dynamo_costs(ask(0), candidates) == [100.0]
    assert dynamo_costs(ask(0), candidates, active_request_weight=32.0) == [228.0]


def test_dynamo_agentic_has_the_weights_of_the_preset() -> None:
    """Credit 2, scale 4 and 64 blocks a request in flight: a busy holder of three quarters is worth it, one with two
    requests more is not."""
    candidates, request = fleet(2), ask(640, {"e0": 480})
    policy = make_policy(PolicyName.DYNAMO_AGENTIC, rng=Random(1))
    for candidate in candidates:
        count_live_blocks(candidate.load, True)
    live(candidates[0], [1])
    choice = policy.choose(request, candidates, 0.0)
    assert (choice.index, choice.costs) == (0, [4 * 0.0 + 1 + 64, 4 * 40.0])
    live(candidates[0], [1], times=2)
    assert policy.choose(request, candidates, 0.0).index == 1


def test_dynamo_takes_resident_tokens_where_live_blocks_are_not_counted() -> None:
    """As on receipts of a proxy that did not count them: pending and own tokens plus live and own tokens."""
    candidates = fleet(2)
    occupy(candidates[0], uncached=640, cached=64)
    costs = Dynamo(rng=Random(1)).choose(ask(1280, {"e1": 640}), candidates, 0.0).costs
    assert costs == pytest.approx([(640 + 1280 + 704 + 1280) / 16, (640 + 1280) / 16])


def test_dynamo_credits_lower_tiers_less() -> None:
    """Device blocks count whole, host blocks three quarters; the scale weighs prefill against decode."""
    held = {"e0": Overlap(640), "e1": Overlap(0, ((Tier.HOST, 640),))}
    costs = dynamo_costs(ask(640, held, blocks=range(40)), fleet(2), prefill_load_scale=2.0)
    assert costs == pytest.approx([40.0, 2 * 10.0 + 40.0])


def test_llm_d_sums_weighted_scores() -> None:
    """Prefix 2, queue 1, free memory 1, each between 0 and 1."""
    candidates = fleet(3)
    occupy(candidates[0], uncached=1000, times=2)
    occupy(candidates[1], uncached=1000)
    policy = LlmD(rng=Random(1), weights=LlmDWeights(kv_capacity_tokens=4000))
    costs = policy.choose(ask(100, {"e0": 100, "e1": 50}), candidates, 0.0).costs
    assert costs == pytest.approx([-(2.0 + 0.0 + 0.5), -(0.0 + 0.5 + 0.75), -(0.0 + 1.0 + 1.0)])


def test_llm_d_places_holders_between_the_least_and_the_most_that_any_holds() -> None:
    """As its utils.go: the least holder scores as one that holds nothing, holders that are alike all score 1."""
    policy = LlmD(rng=Random(1), weights=LlmDWeights(queue=0, kv=0))

    def scores(**held: int) -> list[float]:
        return [-cost for cost in policy.choose(ask(100, held), fleet(4), 0.0).costs]

    assert scores(e0=80, e1=60, e2=40) == [2.0, 1.0, 0.0, 0.0]
    assert scores(e0=30, e1=30) == [2.0, 2.0, 0.0, 0.0]
    assert scores() == [0.0] * 4


def test_llm_d_counts_shared_memory_once() -> None:
    """Three requests that share all their blocks use as much KV memory as one."""
    candidates = fleet(2)
    live(candidates[0], range(100), times=3)
    live(candidates[1], range(100, 350))
    weights = LlmDWeights(prefix=0, queue=0, kv_capacity_tokens=8000)
    costs = LlmD(rng=Random(1), weights=weights).choose(ask(64), candidates, 0.0).costs
    assert costs == pytest.approx([-(1 - 1600 / 8000), -(1 - 4000 / 8000)])


@pytest.mark.parametrize(
    ("held", "pending", "max_penalty_s", "chosen"),
    [
        ({"e0": 90, "e1": 85, "e2": 10}, (0, 0, 0), 5.0, {0}),  # narrowed to two; the first has less to compute
        ({"e0": 90, "e1": 10}, (500, 50), 0.1, {1}),  # 450 ms more than the other one may not be
        ({"e0": 90, "e1": 10}, (500, 50), 1.0, {0}),  # 450 ms is within a second
        ({"e0": 10, "e1": 20, "e2": 50}, (0, 0, 0), 5.0, {2}),  # none is sticky: of all
    ],
)
def test_llm_d_sticky_leaves_the_holders_when_they_are_saturated(
    held: dict[str, int], pending: tuple[int, ...], max_penalty_s: float, chosen: set[int]
) -> None:
    """The worked examples of its filter's tests (plugin_test.go), at 1,000 tokens a second."""
    candidates = fleet(len(pending))
    for candidate, tokens in zip(candidates, pending, strict=True):
        candidate.load.reserve(tokens, 0, 0.0)
    policy = LlmDSticky(rng=Random(1), peak_tokens_per_s=1000.0, max_penalty_s=max_penalty_s)
    assert {policy.choose(ask(100, held), candidates, 0.0).index for _ in range(20)} == chosen


def test_lmetric_multiplies_prefill_and_batch() -> None:
    """(pending + own) tokens times (in flight + 1)."""
    candidates = fleet(2)
    occupy(candidates[0], uncached=100)
    decode(candidates[1], tokens=50, times=3)
    costs = LMetric(rng=Random(1)).choose(ask(100, {"e0": 60}), candidates, 0.0).costs
    assert costs == pytest.approx([140 * 2, 100 * 4])


def test_least_ttft_adds_wait_and_own_time_of_a_slow_endpoint() -> None:
    """Greedy in learned seconds, which it learns like kv_aware."""
    candidates, policy = fleet(2), LeastTtft(rng=Random(1))
    for second in range(100):
        policy.observe_sample(candidates[0].id, features_of(2000, 0), 0.2, float(second))
        policy.observe_sample(candidates[1].id, features_of(2000, 0), 0.6, float(second))
    costs = policy.choose(ask(2000), candidates, 100.0).costs
    assert costs[1] / costs[0] == pytest.approx(3.0, rel=0.15)
    policy.observe_reuse(candidates[0].id, 100, 0, 100.0)
    policy.forget(candidates[1].id)
    assert policy.choose(ask(2000), candidates, 100.0).costs[1] < costs[1]
