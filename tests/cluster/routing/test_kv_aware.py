"""kv_aware as a table: what it weighs, and what it learns."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from kvproxy.base.types import Tier
from kvproxy.cluster.routing.kv_aware import LATE_FROM, LATE_SLACK_S, MAX_DELAYED, CostWeights, KvAware
from kvproxy.cluster.routing.policy import Overlap, PickRequest
from kvproxy.cluster.routing.remote_load import ReplicaSpread
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import features_of, seconds_of
from tests.cluster.routing.fleet import FakeCandidate, ask, decode, fleet, occupy, place

CONSTANT = CostWeights(crowding=0.0, congestion=0.0, stall=0.1, usual_waits=0.0)


def policy(weights: CostWeights = CONSTANT) -> KvAware:
    return KvAware(rng=Random(1), weights=weights)


def chosen(request: PickRequest, candidates: list[FakeCandidate], weights: CostWeights = CONSTANT) -> str:
    return candidates[policy(weights).choose(request, candidates, 0.0).index].id


def test_overlap_beats_a_short_queue() -> None:
    """A long shared prefix outweighs one waiting request."""
    candidates = fleet(2)
    occupy(candidates[0], uncached=500)
    assert chosen(ask(8000, {"e0": 7500}), candidates) == "e0"


def test_a_long_queue_beats_overlap() -> None:
    """Waiting for minutes is dearer than computing the prefix again."""
    candidates = fleet(2)
    occupy(candidates[0], uncached=8000, times=20)
    assert chosen(ask(8000, {"e0": 7500}), candidates) == "e1"


def test_a_batch_that_decodes_is_disturbed_by_prefill() -> None:
    """Of two idle prefill queues the one with fewer decoding sequences is taken."""
    candidates = fleet(2)
    decode(candidates[0], tokens=500, times=10)
    assert chosen(ask(4000), candidates) == "e1"


@pytest.mark.parametrize(
    ("fewest", "here", "counted"),
    [(0, 40, 40), (20, 50, 50), (20, 300, 60), (50, 58, 58), (50, 300, 65), (220, 230, 70), (220, 300, 75)],
)
def test_large_batches_are_kept_alike(fewest: int, here: int, counted: int) -> None:
    """Sixty sequences count as stalled, and with as many everywhere a few of those that are more on one endpoint."""
    candidates = fleet(2)
    decode(candidates[0], tokens=500, times=here)
    decode(candidates[1], tokens=500, times=fewest)
    costs = policy().choose(ask(4000), candidates, 0.0).costs
    own_s = seconds_of(features_of(4000, 0), SpeedModel().seconds)
    assert costs == pytest.approx([own_s * (1.0 + 0.1 * counted), own_s * (1.0 + 0.1 * min(fewest, 60))])


def test_replicating_a_hot_prefix_is_an_investment() -> None:
    """The same queue drives a hot prefix to a second endpoint, and a cold one not."""
    candidates = fleet(2)
    occupy(candidates[0], uncached=3000)
    held = {"e0": 4000}
    assert chosen(ask(4100, held), candidates) == "e0"
    assert chosen(ask(4100, held, hot=4000), candidates) == "e1"


def test_the_hot_discount_is_for_missing_tokens_only() -> None:
    """An endpoint that holds the hot prefix gets none, one that lacks it a quarter of the price for that part."""
    candidates = fleet(2)
    costs = policy().choose(ask(1000, {"e0": 1000}, hot=1000), candidates, 0.0).costs
    own_s = seconds_of(features_of(1000, 0), SpeedModel().seconds)
    assert costs == pytest.approx([0.010, 0.25 * own_s])


def test_a_hot_length_beyond_the_prompt_is_harmless() -> None:
    """The discount is capped by what is uncached, even when nothing is."""
    candidates = fleet(2)
    costs = policy().choose(ask(100, {"e0": 100}, hot=5000), candidates, 0.0).costs
    assert costs[0] == pytest.approx(0.010)


def test_lower_tiers_count_as_held_and_cost_what_was_measured() -> None:
    """Blind to host memory one prefills again; the price is learned."""
    candidates = fleet(2)
    assert chosen(ask(8000, {"e0": Overlap(0, ((Tier.HOST, 8000),)), "e1": 100}), candidates) == "e0"
    subject = policy()
    for second in range(3000):
        lower = ((Tier.HOST, 8000),)
        work = features_of(100, 8000, subject.speeds.onboarding_s(candidates[0].id, lower))
        true_s = seconds_of(features_of(100, 8000), subject.speeds.seconds) + 0.08
        subject.observe_sample(candidates[0].id, work, true_s, float(second), lower=lower)
    costs = subject.choose(ask(8000, {"e0": Overlap(0, ((Tier.HOST, 8000),)), "e1": 8000}), candidates, 9e9).costs
    assert costs[0] > costs[1]
    half = subject.choose(ask(8000, {"e0": Overlap(4000, ((Tier.HOST, 4000),)), "e1": 8000}), candidates, 9e9).costs
    assert costs[0] > half[0] > half[1]  # only what has to be brought up is paid for


def test_slow_endpoints_wait_longer_but_are_not_starved() -> None:
    """Slowness scales wait and own time; what others suffer is charged alike everywhere."""
    candidates, subject = fleet(2), policy()
    for second in range(200):
        for candidate, factor in ((candidates[0], 1.0), (candidates[1], 1.8)):
            work = features_of(2000, 0)
            subject.observe_sample(candidate.id, work, 0.3 * factor, float(second))
    costs = subject.choose(ask(2000), candidates, 200.0).costs
    assert costs[0] < costs[1] < 1.8 * costs[0]


def test_weight_divides_the_cost() -> None:
    """A slow-starting endpoint with half of its weight looks twice as dear."""
    candidates = fleet(2)
    candidates[0].weight = 0.5
    costs = policy().choose(ask(1000), candidates, 0.0).costs
    assert costs[0] == pytest.approx(2 * costs[1])


def test_ties_are_spread() -> None:
    """Equal endpoints share, so that a burst does not herd onto the first."""
    candidates, subject = fleet(4), policy()
    assert {subject.choose(ask(1000), candidates, 0.0).index for _ in range(60)} == {0, 1, 2, 3}


def test_ties_follow_the_rng() -> None:
    """The same seed decides the same."""
    candidates = fleet(8)
    first, second = policy(), policy()
    assert [first.choose(ask(9), candidates, 0.0).index for _ in range(30)] == [
        second.choose(ask(9), candidates, 0.0).index for _ in range(30)
    ]


@pytest.mark.parametrize(
    ("held", "queue", "reason"),
    [({}, 0, "no_overlap"), ({"gone": 100}, 0, "no_overlap"), ({"e0": 900}, 0, "overlap"), ({"e0": 900}, 99, "load")],
)
def test_reason_says_how_the_choice_stands_to_the_cache(held: dict[str, int], queue: int, reason: str) -> None:
    """A closed set: no endpoint holds anything, the best holder, or passed over for its load."""
    candidates = fleet(2)
    occupy(candidates[0], uncached=8000, times=queue)
    assert policy().choose(ask(1000, held), candidates, 0.0).reason == reason


def keep_bound(subject: KvAware, candidate: FakeCandidate, requests: int, now: float = 0.0) -> None:
    """Lets requests come that only `candidate` holds the prompt of; they finish at once."""
    for _ in range(requests):
        subject.placed(ask(8000, {candidate.id: 7900}), [candidate, *fleet(1)], 0, now, choice=None)


def only(**weights: float) -> CostWeights:
    """Return weights that are 0 except these."""
    return CostWeights(**{"crowding": 0.0, "congestion": 0.0, "stall": 0.0, "usual_waits": 0.0, **weights})


def test_long_work_goes_where_fewer_are_bound() -> None:
    """Of two idle endpoints the one that fewer come back to: they would wait for the long prompt."""
    subject, candidates = policy(only(crowding=0.25)), fleet(2)
    place(subject, ask(2), candidates)
    keep_bound(subject, candidates[0], 20)
    costs = subject.choose(ask(50_000), candidates, 0.0).costs
    assert costs[0] > 1.2 * costs[1]


@pytest.mark.parametrize(("queued", "expected"), [(8_000, "e1"), (60_000, "e0")])
def test_room_for_others_makes_no_request_late(queued: int, expected: str) -> None:
    """A prompt leaves an idle endpoint to those that come back to it, unless it would take twice as long elsewhere."""
    subject, candidates = policy(only(crowding=10.0)), fleet(2)
    place(subject, ask(2), candidates)
    keep_bound(subject, candidates[0], 1000)
    occupy(candidates[1], uncached=queued)
    assert candidates[subject.choose(ask(20_000), candidates, 0.0).index].id == expected


def test_a_prompt_may_wait_longer_to_save_work() -> None:
    """Beside an endpoint with none of the prompt, a busy one that holds most of it is never late."""
    subject, candidates = policy(only(crowding=10.0)), fleet(2)
    place(subject, ask(2), candidates)
    keep_bound(subject, candidates[1], 1000)
    occupy(candidates[0], uncached=60_000)
    choice = subject.choose(ask(20_000, {"e0": 19_000}), candidates, 0.0)
    own_s = seconds_of(features_of(20_000, 0), subject.speeds.seconds)
    assert choice.costs[0] > LATE_FROM * own_s + LATE_SLACK_S
    assert candidates[choice.index].id == "e0"


def test_an_adapter_that_is_loaded_counts_for_the_first_token() -> None:
    """Seconds until an adapter is loaded make the idle endpoint the later one."""
    subject, candidates = policy(only()), fleet(2)
    occupy(candidates[0], uncached=8_000)
    request = msgspec.structs.replace(ask(2_000), adapter_s={candidates[1].id: 30.0})
    assert candidates[subject.choose(request, candidates, 0.0).index].id == "e0"


@pytest.mark.parametrize("rank", range(4))
def test_work_placed_by_others_in_a_large_pool_keeps_no_request_from_its_prefix(rank: int) -> None:
    """In 10 ms they fill a thousand endpoints a little, and not that one by all they do. (Half of the prompt is held,
    so that no endpoint is late.)"""
    subject = policy()
    subject.others = ReplicaSpread(delay_s=0.01, routers=4, rank=rank)
    candidates = fleet(1000)
    for _ in range(100):
        subject.utilisation.add(0.9 * 1000, 1000, 0.0)
    choice = subject.choose(ask(4000, {"e500": 2000}), candidates, 0.0)
    assert candidates[choice.index].id == "e500"


def test_bound_requests_are_forgotten() -> None:
    """Minutes later no request is expected any more."""
    subject, candidates = policy(only(crowding=0.25)), fleet(2)
    place(subject, ask(2), candidates)
    keep_bound(subject, candidates[0], 20)
    costs = subject.choose(ask(50_000), candidates, 300.0).costs
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)


@pytest.mark.parametrize("held", [{}, {"e0": 7900, "e1": 7900}, {"e0": 3000}], ids=["nowhere", "both", "a little"])
def test_requests_as_well_off_elsewhere_are_not_bound(held: dict[str, int]) -> None:
    """Only those count that would take twice as long on another endpoint."""
    subject, candidates = policy(only(crowding=10.0)), fleet(2)
    place(subject, ask(2), candidates)
    for _ in range(100):
        subject.placed(ask(8000, held), candidates, 0, 0.0, choice=None)
    costs = subject.choose(ask(50_000), candidates, 0.0).costs
    assert costs[0] == costs[1]


def test_a_pool_of_one_binds_nobody() -> None:
    """Where there is nothing to choose nothing is counted."""
    subject, candidates = policy(only(crowding=10.0)), fleet(1)
    for _ in range(100):
        place(subject, ask(8000, {"e0": 7900}), candidates)
    assert subject.estimates(0.0)["bound_per_s"] == {"e0": 0.0}


def test_where_all_are_busy_a_copy_costs_everybody() -> None:
    """With a backlog everywhere work is kept down: the prompt waits for its cached half, where an idle pool had not."""
    subject, candidates = policy(only(congestion=0.2)), fleet(2)
    occupy(candidates[0], uncached=60_000)
    occupy(candidates[1], uncached=40_000)
    long = ask(60_000, {"e0": 30_000})
    assert candidates[subject.choose(long, candidates, 0.0).index].id == "e1"
    for _ in range(200):
        subject.placed(ask(2), candidates, 0, 0.0, choice=None)
    assert candidates[subject.choose(long, candidates, 0.0).index].id == "e0"


def test_an_endpoint_that_is_always_busy_is_left() -> None:
    """Of two equally long queues now, the one that is usually short: the session comes back to it."""
    subject, candidates = policy(only(usual_waits=0.4)), fleet(2)
    (work,) = occupy(candidates[0], uncached=20_000)
    place(subject, ask(2), candidates)
    usual_s = candidates[0].load.wait_s(subject.speeds.seconds, 1.0, 0.0)
    candidates[0].load.release(work, 1.0)
    costs = subject.choose(ask(2000), candidates, 1.0).costs
    assert usual_s > 2.0
    assert costs[0] - costs[1] == pytest.approx(0.4 * usual_s, rel=0.05)


def test_no_work_delays_more_than_a_few() -> None:
    """However many come: the cost stays finite, and comparable between endpoints."""
    subject, candidates = policy(only(crowding=10.0, congestion=10.0)), fleet(2)
    for candidate in candidates:
        occupy(candidate, uncached=60_000)
    alone = policy(only()).choose(ask(100_000), candidates, 0.0).costs[0]
    place(subject, ask(2), candidates)
    for candidate in candidates:
        keep_bound(subject, candidate, 100_000)
    own_s = seconds_of(features_of(100_000, 0), subject.speeds.seconds)
    assert subject.choose(ask(100_000), candidates, 0.0).costs[0] == pytest.approx(alone + 2 * MAX_DELAYED * own_s)


def test_without_facts_it_still_balances() -> None:
    """No prompt length known: the shorter queue."""
    candidates = fleet(2)
    occupy(candidates[0], uncached=500)
    assert chosen(PickRequest(), candidates) == "e1"


def test_departed_endpoints_are_forgotten() -> None:
    """Speeds and arrivals of an endpoint go with it."""
    subject = policy()
    place(subject, ask(2), fleet(1))
    subject.observe_sample(fleet(1)[0].id, features_of(100, 0), 0.2, 1.0)
    assert set(subject.speeds.estimates(1.0).slowness) == {"e0"}
    subject.forget(fleet(1)[0].id)
    assert not subject.speeds.estimates(1.0).slowness
    assert subject.estimates(1.0)["bound_per_s"] == {}


def test_a_claim_longer_than_the_prompt_is_the_prompt() -> None:
    """Estimated lengths may disagree; no endpoint holds more than there is."""
    costs = policy().choose(ask(1000, {"e0": 5000, "e1": 1000}), fleet(2), 0.0).costs
    assert costs[0] == costs[1] == pytest.approx(0.010)


def test_learned_state_is_plain_data() -> None:
    """For status and metrics: speeds, utilisation, and by endpoint slowness and requests that keep coming."""
    subject = policy(CostWeights())
    subject.observe_sample(fleet(1)[0].id, features_of(100, 0), 0.2, 1.0)
    learned = subject.estimates(1.0)
    assert learned["samples"] == 1
    assert learned["rho"] == pytest.approx(0.5)
    assert learned["arrivals_per_s"] == 0.0
    assert learned["usual_wait_s"] == {}


def test_a_wrong_prediction_teaches_no_speed() -> None:
    """A wrong prediction is its source's fault, not the engine's speed."""
    subject = policy()
    before = subject.speeds.seconds
    subject.observe_reuse(fleet(1)[0].id, 1000, 0, 1.0)
    assert subject.speeds.seconds == before
