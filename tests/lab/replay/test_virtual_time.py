"""Replays in virtual time: every request ends once, figures follow from the engines, knowledge is what a router has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from kvproxy.cluster.routing.work import prefill_s
from kvproxy.cluster.settings import PolicyName
from kvproxy.lab.replay.compare import PolicySpec, UnknownPolicy, play_policy
from kvproxy.lab.replay.pooled import PooledFleet
from kvproxy.lab.replay.results import ReplayOutcome, Summary, compute_rate, percentile, summarize_outcomes
from kvproxy.lab.replay.router import LiveRequest, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import IndexMode, Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace, parse_trace
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.timing import EngineTiming
from tests.lab.replay.traces import chat_trace, lines, shared_prefix_trace

FLEET = ReplayFleet(instances=3)
KV_AWARE = PolicySpec(PolicyName.KV_AWARE)
ROUND_ROBIN = PolicySpec(PolicyName.ROUND_ROBIN)


def outcomes_of(
    trace: Trace, pace: Pace, fleet: ReplayFleet, spec: PolicySpec, seed: int = 0
) -> Sequence[ReplayOutcome]:
    policy = spec.make(rng=Random(seed))
    return play_policy(trace, pace, fleet, policy, spec, seed=seed)


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
    """Requests in flight are known without them."""
    trace = shared_prefix_trace()
    late = figures(trace, replace(FLEET, index_delay_s=0.5))
    assert late.hit_rate == pytest.approx(figures(trace).hit_rate, abs=0.05)


@pytest.mark.slow
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


def test_a_lost_engine_loses_answers_and_its_waiting_requests_go_elsewhere() -> None:
    """As in the proxy: what has no first token is routed again, a broken answer fails; its cache is gone for good."""
    trace = shared_prefix_trace(requests=300, gap_ms=20)
    outcomes = outcomes_of(trace, Pace(), replace(FLEET, leaves=((0, 0.5),)), KV_AWARE)
    middle = Pace().duration_s(trace) / 2
    failed = [each for each in outcomes if each.first_token_at is None]
    assert 0 < len(failed) < 60
    assert all(each.endpoint == 0 and each.arrived_at <= middle for each in failed)
    assert {each.endpoint for each in outcomes if each.arrived_at > middle} == {1, 2}
    again = [each for each in outcomes if each.placed_at == middle]
    assert again
    assert all(each.endpoint > 0 and each.arrived_at < middle and each.finished_at is not None for each in again)
    assert len(outcomes) == 300


def test_an_engine_that_joins_is_cold_and_is_used() -> None:
    """Nothing it held before is believed of it, nor found."""
    trace = shared_prefix_trace(requests=300, gap_ms=60)
    fleet = replace(FLEET, joins=((0, 0.6), (1, 0.4)), leaves=((0, 0.3),))
    outcomes = outcomes_of(trace, Pace(), fleet, KV_AWARE)
    duration_s = Pace().duration_s(trace)
    assert all(each.arrived_at > 0.39 * duration_s for each in outcomes if each.endpoint == 1)
    came_back = [each for each in outcomes if each.endpoint == 0 and each.arrived_at > 0.5 * duration_s]
    assert came_back
    assert (came_back[0].predicted_tokens, came_back[0].cached_tokens) == (0, 0)
    assert summarize_outcomes(outcomes, 3).wrong_share < 0.05


def test_late_events_of_a_lost_engine_are_not_believed_of_the_next() -> None:
    """They tell of a cache that is gone: to believe them is to be wrong about the engine that came in its place."""
    trace = shared_prefix_trace(requests=300, gap_ms=60)
    for delay_s in (0.0, 5.0):
        fleet = replace(FLEET, leaves=((0, 0.3),), joins=((0, 0.31),), index_delay_s=delay_s)
        outcomes = outcomes_of(trace, Pace(), fleet, KV_AWARE)
        joined_at = 0.31 * Pace().duration_s(trace)
        after = [each for each in outcomes if each.endpoint == 0 and (each.placed_at or 0.0) >= joined_at]
        assert after
        assert summarize_outcomes(after, 3).wrong_share < 0.02


def test_the_load_of_a_departed_peer_is_dropped() -> None:
    """An engine that comes in its place begins with nothing under way."""
    trace = shared_prefix_trace(requests=4)
    blocks = FLEET.blocks_of(trace)
    pool = PooledFleet(FLEET, blocks.size)
    router = VirtualRouter(pool.endpoints, KV_AWARE.make(rng=Random(1)), pool)
    turns = [blocks.split(turn) for _, turn in trace.turns_in_nominal_order(service_s=1.0)]
    outcome = ReplayOutcome(0.0, turns[0].prompt_tokens)
    placed = [router.arrive(LiveRequest(number, 0, turn, outcome), 1.0) for number, turn in enumerate(turns)]
    gone = pool.endpoints[0]
    lost = [one for one in placed if one is not None and one.endpoint is gone]
    assert gone.load.in_flight == len(lost) > 0
    router.leave(gone, lost, 2.0)
    assert (gone.load.in_flight, gone.load.pending_tokens, gone.load.resident_tokens) == (0, 0, 0)
    assert gone not in router.endpoints


@pytest.mark.parametrize("index", IndexMode)
@pytest.mark.parametrize("queue", [False, True])
def test_every_session_goes_on_when_engines_come_and_go(index: IndexMode, queue: bool) -> None:
    """A broken answer ends its turn, not the conversation; late events of a lost engine are not believed."""
    trace = chat_trace()
    fleet = replace(FLEET, leaves=((0, 0.2), (1, 0.5)), joins=((0, 0.4),), index=index, index_delay_s=0.3)
    outcomes = outcomes_of(trace, Pace(scale=0.1), fleet, PolicySpec(PolicyName.KV_AWARE, queue, True))
    assert len(outcomes) == trace.requests
    assert sum(each.finished_at is not None for each in outcomes) >= trace.requests - 12


@pytest.mark.parametrize(
    ("joins", "leaves"), [((), ((0, 0.5), (1, 0.6), (2, 0.7))), (((0, 0.1), (1, 0.1), (2, 0.2)), ()), (((3, 0.5),), ())]
)
def test_a_fleet_is_never_empty(joins: tuple[tuple[int, float], ...], leaves: tuple[tuple[int, float], ...]) -> None:
    """There would be nothing to choose from; nor is there an engine of a number beyond the fleet."""
    with pytest.raises(ValueError, match="one is always there"):
        replace(FLEET, joins=joins, leaves=leaves)


def test_a_prompt_no_engine_can_hold_fails_and_the_session_goes_on() -> None:
    """Counted as failed, not waited for."""
    rows = (
        {"timestamp": 0, "session_id": 1, "input_length": 5120, "output_length": 1, "hash_runs": [0, 10]},
        {"delay": 10, "session_id": 1, "input_length": 600, "output_length": 1, "hash_runs": [0, 1]},
    )
    trace, fleet = parse_trace(lines(*rows), name="long"), replace(FLEET, capacity_tokens=2048)
    summary = figures(trace, fleet)
    assert (summary.requests, summary.failed) == (2, 1)
    failed, served = outcomes_of(trace, Pace(), fleet, KV_AWARE)
    assert (failed.first_token_at, failed.finished_at) == (None, None), "no figure counts how soon it was refused"
    assert served.finished_at is not None


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


@pytest.mark.parametrize(
    ("trace", "scale", "capacity_tokens", "ttft_s", "e2e_s"),
    [
        (shared_prefix_trace(), 0.3, 819_200, 0.9816325347265624, 3.258806626067709),
        (shared_prefix_trace(), 0.3, 9 * 512, 9.726165150690104, 10.098500674895837),
        (chat_trace(), 0.05, 819_200, 0.3128349424479165, 0.7171407826822915),
        (chat_trace(), 0.05, 9 * 512, 0.3859643174479163, 0.6569133497395829),
    ],
)
def test_the_default_engine_stays_what_it_was(
    trace: Trace, scale: float, capacity_tokens: int, ttft_s: float, e2e_s: float
) -> None:
    """Figures of the first engine, before it had presets, priorities, floors and smaller blocks."""
    summary = figures(trace, replace(FLEET, capacity_tokens=capacity_tokens), ROUND_ROBIN, Pace(scale=scale))
    assert summary.ttft_mean_s == pytest.approx(ttft_s, rel=1e-12)
    assert summary.e2e_mean_s == pytest.approx(e2e_s, rel=1e-12)


def growing_chat(block_size: int) -> Trace:
    """Return turns whose prompts are the one before, its answer and sixteen tokens."""
    rows: list[dict[str, object]] = []
    for session in range(6):
        prompt = 1024
        for turn in range(4):
            timing = {"timestamp": session * 500} if turn == 0 else {"delay": 500}
            hashes = list(range(session * 1000, session * 1000 + prompt // block_size))
            rows.append({**timing, "session_id": session, "input_length": prompt, "output_length": 256,
                         "hash_ids": hashes})  # fmt: skip
            prompt += 256 + 16
    return parse_trace(lines(*rows, block_size=block_size), name="growing")


def test_answers_become_reusable_where_asked() -> None:
    """The next turn then computes its own sixteen tokens and the last block, as with vLLM, and no answer."""
    trace, fleet = growing_chat(16), replace(FLEET, instances=1)
    plain = outcomes_of(trace, Pace(), fleet, KV_AWARE)
    reused = outcomes_of(trace, Pace(), replace(fleet, reuse_outputs=True), KV_AWARE)
    assert {each.prompt_tokens - each.cached_tokens for each in plain if each.cached_tokens} == {272}
    assert {each.prompt_tokens - each.cached_tokens for each in reused if each.cached_tokens} == {32}
    assert [each.predicted_tokens for each in reused] == [each.cached_tokens for each in reused]


def test_smaller_blocks_waste_no_memory_on_short_prompts() -> None:
    """Sixty tokens take a block of 512, or four of 16: a cache of 4 096 tokens runs eight, or all that come."""
    rows = [{"timestamp": number, "input_length": 60, "output_length": 50, "hash_ids": []} for number in range(40)]
    trace, fleet = parse_trace(lines(*rows), name="short"), replace(FLEET, instances=1, capacity_tokens=4096)
    coarse, fine = figures(trace, fleet, ROUND_ROBIN), figures(trace, replace(fleet, block_size=16), ROUND_ROBIN)
    assert fine.ttft_mean_s < 0.5 * coarse.ttft_mean_s


def test_smaller_blocks_find_what_large_ones_find() -> None:
    """The same prefixes, known to the router in the engines' own blocks."""
    trace = shared_prefix_trace()
    coarse, fine = figures(trace), figures(trace, replace(FLEET, block_size=32))
    assert fine.hit_rate == pytest.approx(coarse.hit_rate, abs=0.02)
    assert fine.wrong_share == 0.0


def test_any_seed_but_none_moves_the_arrivals() -> None:
    """By half a second at most, so that a figure has a spread."""
    trace = shared_prefix_trace()
    plain, *jittered = (outcomes_of(trace, Pace(), FLEET, ROUND_ROBIN, seed) for seed in (0, 1, 2))
    assert [each.arrived_at for each in plain] == [at for at, _, _ in Pace().arrivals(trace)]
    later = [[each.arrived_at for each in outcomes] for outcomes in jittered]
    assert later[0] != later[1]
    for outcomes in later:
        assert all(0.0 <= at - before.arrived_at <= 0.5 for at, before in zip(outcomes, plain, strict=True))


def test_an_outcome_says_when_it_was_placed_and_admitted_and_how_often_it_started_over() -> None:
    """Waits in the router, waits in the engine, and restarts for want of memory are apart."""
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 900, "hash_ids": [number]} for number in range(9)]
    trace, fleet = parse_trace(lines(*rows), name="tight"), replace(FLEET, instances=1, capacity_tokens=7 * 512)
    outcomes = outcomes_of(trace, Pace(), fleet, PolicySpec(PolicyName.KV_AWARE, queue=True))
    assert sum(each.preemptions for each in outcomes) > 0
    for each in outcomes:
        assert each.placed_at is not None
        assert each.admitted_at is not None
        assert each.first_token_at is not None
        assert each.arrived_at <= each.placed_at <= each.admitted_at < each.first_token_at


def test_a_greedy_tenants_requests_stand_behind_anothers() -> None:
    """Turns of tenants are in the number as the proxy forwards it."""
    engines = [SimEndpoint(endpoint_id(0), 0, Engine(FLEET.engine_settings(512, 0, 1.0)))]
    rows = {"timestamp": 0, "input_length": 30_000, "output_length": 1, "hash_ids": []}
    turn = parse_trace(lines(rows), name="one").sessions[0].turns[0]
    view = IndexView(replace(FLEET, instances=1), 512, rng=Random(1))
    router = VirtualRouter(engines, KV_AWARE.make(rng=Random(1)), view, priority=True)
    numbers = []
    for tenant, at in [("greedy", 10.0), ("greedy", 10.0), ("polite", 10.0), ("greedy", 12.0), ("polite", 12.0)]:
        placement = router.arrive(LiveRequest(0, 0, turn, ReplayOutcome(at, 30_000, tenant=tenant)), at)
        assert placement is not None
        numbers.append(placement.priority)
    assert numbers[3] > numbers[4]


def test_progress_is_reported() -> None:
    """Once for every finished request."""
    seen: list[int] = []
    play_policy(chat_trace(), Pace(), FLEET, ROUND_ROBIN.make(rng=Random(1)), progress=seen.append)
    assert seen == list(range(1, 49))


@pytest.mark.parametrize(
    "text",
    ["kv_aware", "kv_aware+no_queue", "least_ttft+priority", "least_ttft+queue+priority", "round_robin", "lmetric"],
)
def test_policies_are_named_as_in_the_configuration(text: str) -> None:
    """With +queue and +priority where the policy knows how long a prefill takes; kv_aware has the queue by itself."""
    assert str(PolicySpec.parse(f" {text} ")) == text


def test_suffixes_of_a_policy_may_come_in_any_order() -> None:
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


def test_reuse_beyond_a_prediction_makes_up_for_no_wrong_one() -> None:
    """The wrong share counts the predicted tokens that were missing, request by request."""
    missed = ReplayOutcome(0.0, 100, 0, predicted_tokens=80, cached_tokens=20, first_token_at=1.0, finished_at=2.0)
    surprised = ReplayOutcome(0.0, 100, 1, predicted_tokens=20, cached_tokens=80, first_token_at=1.0, finished_at=2.0)
    assert summarize_outcomes([missed, surprised], 2).wrong_share == 0.6
