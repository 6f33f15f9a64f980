"""Replays in virtual time: every request ends once, figures follow from the engines, knowledge is what a router has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from kvproxy.config.cluster_schema import PolicyName
from kvproxy.replay.results import ReplayOutcome, Summary, compute_rate, percentile, summarize_outcomes
from kvproxy.replay.router import LiveRequest, SimEndpoint, VirtualRouter
from kvproxy.replay.scenario import PolicySpec, UnknownPolicy, play_policy
from kvproxy.replay.settings import IndexMode, Pace, ReplayFleet
from kvproxy.replay.trace import Trace, parse_trace
from kvproxy.replay.view import IndexView, endpoint_id
from kvproxy.routing.load import prefill_s
from kvproxy.simulator.engine import Engine
from kvproxy.simulator.timing import EngineTiming
from tests.replay.traces import chat_trace, lines, shared_prefix_trace

FLEET = ReplayFleet(instances=3)
KV_AWARE = PolicySpec(PolicyName.KV_AWARE)
ROUND_ROBIN = PolicySpec(PolicyName.ROUND_ROBIN)


def outcomes_of(
    trace: Trace, pace: Pace, fleet: ReplayFleet, spec: PolicySpec, seed: int = 1
) -> Sequence[ReplayOutcome]:
    policy = spec.make(rng=Random(seed))
    return play_policy(trace, pace, fleet, policy, queue=spec.queue, priority=spec.priority, seed=seed)


def figures(trace: Trace, fleet: ReplayFleet = FLEET, spec: PolicySpec = KV_AWARE, pace: Pace = Pace()) -> Summary:
    return summarize_outcomes(outcomes_of(trace, pace, fleet, spec), fleet.instances)


@pytest.mark.parametrize(
    "spec",
    [
        *(PolicySpec(name) for name in PolicyName),
        PolicySpec(PolicyName.KV_AWARE, queue=True),
        PolicySpec(PolicyName.KV_AWARE, priority=True),
        PolicySpec(PolicyName.KV_AWARE, queue=True, priority=True),
    ],
    ids=str,
)
def test_every_policy_finishes_every_request(spec: PolicySpec) -> None:
    """Nothing is lost, nothing ends before it began."""
    trace = chat_trace()
    outcomes = outcomes_of(trace, Pace(scale=0.2), FLEET, spec)
    assert len(outcomes) == trace.requests
    for outcome in outcomes:
        assert outcome.first_token_at is not None
        assert outcome.finished_at is not None
        assert outcome.arrived_at < outcome.first_token_at <= outcome.finished_at
        assert 0 <= outcome.endpoint < 3


def test_the_same_seed_is_the_same_run() -> None:
    """Virtual time has no chance in it beyond the seeds."""
    trace = shared_prefix_trace()
    assert figures(trace) == figures(trace)


def test_kv_aware_beats_round_robin_where_prefixes_repeat() -> None:
    """More hits, shorter first tokens."""
    trace = shared_prefix_trace(gap_ms=100)
    aware, robin = figures(trace), figures(trace, spec=ROUND_ROBIN)
    assert aware.hit_rate > robin.hit_rate
    assert aware.ttft_mean_s < robin.ttft_mean_s


def test_one_request_alone_takes_what_the_engine_takes() -> None:
    """1 000 tokens at 10 000 a second with their attention; nothing waits."""
    trace = parse_trace(lines({"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1]}), name="one")
    assert figures(trace).ttft_mean_s == pytest.approx(EngineTiming().prefill_s(1000, 0))


def test_closed_loop_waits_for_the_turn_before() -> None:
    """A slow engine delays the next turn; in open loop it comes when it comes."""
    trace, slow = chat_trace(sessions=1, turns=2), replace(FLEET, instances=1, slowness=(50.0,))
    closed = outcomes_of(trace, Pace(), slow, KV_AWARE)
    assert closed[0].finished_at is not None
    assert closed[1].arrived_at == pytest.approx(closed[0].finished_at + 1.5)
    opened = outcomes_of(trace, Pace(closed_loop=False, service_s=1.0), slow, KV_AWARE)
    assert opened[1].arrived_at == pytest.approx(2.5)


def test_the_approximate_index_knows_what_was_routed() -> None:
    """Without events, repeats still go where their prefix is."""
    trace = shared_prefix_trace()
    approximate = figures(trace, replace(FLEET, index=IndexMode.APPROXIMATE))
    assert approximate.hit_rate == pytest.approx(figures(trace).hit_rate, abs=0.05)


def test_late_events_cost_little() -> None:
    """What is in flight is known without them."""
    trace = shared_prefix_trace()
    late = figures(trace, replace(FLEET, index_delay_s=0.5))
    assert late.hit_rate == pytest.approx(figures(trace).hit_rate, abs=0.05)


def test_events_that_come_too_late_for_any_request_help_none() -> None:
    """The delay is one in virtual time: nothing is known but what is in flight."""
    trace = shared_prefix_trace()
    assert figures(trace, replace(FLEET, index_delay_s=1e6)).hit_rate < figures(trace).hit_rate


def test_false_entries_make_predictions_wrong() -> None:
    """And a contradicted one is taken out, so that the run still ends with hits."""
    trace = shared_prefix_trace()
    lied = figures(trace, replace(FLEET, wrong_share=0.5))
    assert lied.wrong_share > figures(trace).wrong_share
    assert lied.hit_rate > 0.3


def test_a_slow_engine_gets_less_work() -> None:
    """Learned from first tokens alone: the slowness is never told."""
    trace, fleet = shared_prefix_trace(requests=300), replace(FLEET, slowness=(4.0,))
    outcomes = outcomes_of(trace, Pace(), fleet, KV_AWARE)
    counts = [sum(outcome.endpoint == endpoint for outcome in outcomes[100:]) for endpoint in range(3)]
    assert counts[0] < min(counts[1:])


def test_an_engine_that_slows_down_for_a_while_is_avoided_for_a_while() -> None:
    """The middle third of the run."""
    settings = replace(FLEET, slow_middle=3.0).engine_settings(512, 0, 90.0)
    assert settings.timing.slowness_changes == ((30.0, 3.0), (60.0, 1.0))
    assert replace(FLEET, slow_middle=3.0).engine_settings(512, 1, 90.0).timing.slowness_changes == ()


def test_a_prompt_no_engine_can_hold_fails_and_the_session_goes_on() -> None:
    """Counted as failed, not waited for."""
    rows = (
        {"timestamp": 0, "session_id": 1, "input_length": 5120, "output_length": 1, "hash_runs": [0, 10]},
        {"delay": 10, "session_id": 1, "input_length": 600, "output_length": 1, "hash_runs": [0, 1]},
    )
    summary = figures(parse_trace(lines(*rows), name="long"), replace(FLEET, capacity_tokens=2048))
    assert (summary.requests, summary.failed) == (2, 1)


def test_the_queue_holds_requests_back_when_all_are_busy() -> None:
    """A burst of long prompts with short ones behind: the short ones need not wait for all of the long."""
    rows = [
        {"timestamp": number, "input_length": length, "output_length": 2, "hash_runs": [1000 * number, length // 512]}
        for number, length in enumerate([30_000] * 8 + [600] * 8)
    ]
    trace, fleet = parse_trace(lines(*rows), name="burst"), replace(FLEET, instances=2)
    direct, queued = figures(trace, fleet), figures(trace, fleet, PolicySpec(PolicyName.KV_AWARE, queue=True))
    assert queued.failed == 0
    assert queued.ttft_mean_s < 0.8 * direct.ttft_mean_s


def test_engines_admit_short_prompts_before_long_ones_that_came_with_them() -> None:
    """Where prompts wait in engines, priorities shorten the mean, and no request is held in the router for it."""
    rows = [
        {"timestamp": number, "input_length": length, "output_length": 2, "hash_runs": [1000 * number, length // 512]}
        for number, length in enumerate([30_000] * 8 + [600] * 8)
    ]
    trace, fleet = parse_trace(lines(*rows), name="burst"), replace(FLEET, instances=2)
    plain = outcomes_of(trace, Pace(), fleet, KV_AWARE)
    ordered = outcomes_of(trace, Pace(), fleet, PolicySpec(PolicyName.KV_AWARE, priority=True))
    assert [each.endpoint for each in ordered] == [each.endpoint for each in plain]
    assert summarize_outcomes(ordered, 2).ttft_mean_s < 0.8 * summarize_outcomes(plain, 2).ttft_mean_s
    short = [each.ttft_s for each in ordered[8:] if each.ttft_s is not None]
    assert max(short) < min(each.ttft_s for each in ordered[:8] if each.ttft_s is not None and each.ttft_s > 10.0)


def test_a_priority_is_the_routers_own_estimate_and_the_arrival() -> None:
    """Milliseconds: own seconds on the endpoint it goes to, by the policy's speeds, and 0.3 of its time of arrival."""
    engines = [SimEndpoint(endpoint_id(0), 0, Engine(FLEET.engine_settings(512, 0, 1.0)))]
    trace = parse_trace(lines({"timestamp": 0, "input_length": 8192, "output_length": 1, "hash_ids": []}), name="one")
    turn = trace.sessions[0].turns[0]
    sent = []
    for spec in (KV_AWARE, PolicySpec(PolicyName.KV_AWARE, priority=True)):
        policy = spec.make(rng=Random(1))
        view = IndexView(replace(FLEET, instances=1), 512, rng=Random(1))
        router = VirtualRouter(engines, policy, view, priority=spec.priority)
        placement = router.arrive(LiveRequest(0, 0, turn, ReplayOutcome(100.0, 8192)), 101.0)
        assert placement is not None
        assert policy.speeds is not None
        sent.append((placement.priority, round(1000 * (prefill_s(8192, 0, 0, policy.speeds.seconds) + 30.0))))
    assert sent[0][0] == 0
    assert sent[1][0] == sent[1][1]


def test_progress_is_reported() -> None:
    """Once for every finished request."""
    seen: list[int] = []
    play_policy(chat_trace(), Pace(), FLEET, ROUND_ROBIN.make(rng=Random(1)), progress=seen.append)
    assert seen == list(range(1, 49))


@pytest.mark.parametrize(
    "text", ["kv_aware", "kv_aware+queue", "least_ttft+priority", "kv_aware+queue+priority", "round_robin"]
)
def test_policies_are_named_as_in_the_configuration(text: str) -> None:
    """With +queue and +priority where the policy knows how long a prefill takes."""
    assert str(PolicySpec.parse(f" {text} ")) == text


def test_what_goes_with_a_policy_may_come_in_any_order() -> None:
    """`+priority+queue` is `+queue+priority`."""
    assert PolicySpec.parse("kv_aware+priority+queue") == PolicySpec(PolicyName.KV_AWARE, queue=True, priority=True)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("best", "no policy 'best' .*known: consistent_hash"),
        ("kvaware", "did you mean 'kv_aware'"),
        ("cache_aware+queue", "did you mean 'prefix_affinity'"),
        ("lmetric+queue", "queue needs kv_aware"),
        ("lmetric+priority", "priority needs kv_aware"),
        ("kv_aware+prioritiy", "nothing '\\+prioritiy' goes behind a policy .*did you mean '\\+priority'"),
    ],
)
def test_unknown_policies_are_refused(text: str, match: str) -> None:
    """With what would be known."""
    with pytest.raises(UnknownPolicy, match=match):
        PolicySpec.parse(text)


def test_figures_of_nothing_are_zero() -> None:
    """An empty run has no percentiles and no rate."""
    assert percentile([], 0.5) == 0.0
    assert compute_rate([1.0]) == 0.0
    assert compute_rate([1.0, 1.0]) == 0.0
    assert summarize_outcomes([], 2).ttft_mean_s == 0.0


def test_a_rate_counts_the_pauses_between_arrivals() -> None:
    """Three of them within two seconds are one a second, in whatever order they are listed."""
    assert compute_rate([12.0, 10.0, 11.0]) == 1.0


def test_what_was_cached_beyond_a_prediction_makes_up_for_no_wrong_one() -> None:
    """The wrong share counts the predicted tokens that were missing, request by request."""
    missed = ReplayOutcome(0.0, 100, 0, predicted_tokens=80, cached_tokens=20, first_token_at=1.0, finished_at=2.0)
    surprised = ReplayOutcome(0.0, 100, 1, predicted_tokens=20, cached_tokens=80, first_token_at=1.0, finished_at=2.0)
    assert summarize_outcomes([missed, surprised], 2).wrong_share == 0.6
