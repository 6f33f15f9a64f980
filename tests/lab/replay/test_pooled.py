"""The pooled reference and the pace it sets."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvproxy.cluster.settings import PolicyName
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import measure_bound, measure_offered_rate, measure_throughput, play_on_pool
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.settings import ENGINES, ReplayFleet
from kvproxy.lab.replay.trace import Trace, parse_trace
from kvproxy.lab.simulator.engine_io import Scheduling
from tests.lab.replay.traces import chat_trace, lines, shared_prefix_trace

FLEET = ReplayFleet(instances=3, capacity_tokens=100_000)


def test_more_engines_saturate_later() -> None:
    """Throughput grows with the fleet."""
    trace = shared_prefix_trace(requests=300)
    one, three = (measure_throughput(trace, replace(FLEET, instances=count)) for count in (1, 3))
    assert 2.0 * one < three < 4.5 * one


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_an_open_loop_is_paced_to_the_load(load: float) -> None:
    """Requests over the time they come in."""
    trace = shared_prefix_trace(requests=300)
    bound = measure_bound(trace, FLEET, load)
    arrivals = [at for at, _, _ in bound.pace.arrivals(bound.trace)]
    assert (len(arrivals) - 1) / arrivals[-1] == pytest.approx(load * bound.capacity_per_s, rel=0.01)
    assert not bound.pace.closed_loop


def test_a_closed_loop_is_cloned_and_paced_until_its_arrivals_are_right() -> None:
    """A handful of sessions cannot load an engine: there are as many as it takes."""
    trace = chat_trace(sessions=8)
    bound = measure_bound(trace, FLEET, 0.5)
    assert bound.pace.closed_loop
    assert bound.trace.requests > trace.requests
    rate = measure_offered_rate(play_on_pool(bound.trace, bound.pace, FLEET))
    assert rate == pytest.approx(0.5 * bound.capacity_per_s, rel=0.25)


@pytest.mark.slow
def test_slow_sessions_are_paced_until_their_arrivals_are_right() -> None:
    """Those with long pauses come late at the first try: a load that was asked for is the one that is measured."""
    rows = [
        {**({"timestamp": 1000 * session} if not turn else {"delay": 20_000}), "session_id": session,
         "input_length": 512 * (2 + 2 * turn) + 100, "output_length": 30,
         "hash_runs": [0, 1, 1000 * (session + 1), 1 + 2 * turn]}
        for session in range(10)
        for turn in range(4)
    ]  # fmt: skip
    bound = measure_bound(parse_trace(lines(*rows), name="slow"), FLEET, 0.3)
    rate = measure_offered_rate(play_on_pool(bound.trace, bound.pace, FLEET))
    assert rate == pytest.approx(0.3 * bound.capacity_per_s, rel=0.05)


@pytest.mark.slow
def test_no_router_beats_the_pool() -> None:
    """No placement can match every engine holding the blocks of every other."""
    bound = measure_bound(shared_prefix_trace(requests=400), FLEET, 0.8)
    for name in (PolicyName.KV_AWARE, PolicyName.LMETRIC, PolicyName.ROUND_ROBIN):
        summary = summarize_outcomes(
            play_policy(bound.trace, bound.pace, FLEET, PolicySpec(name).make(rng=Random(1))), FLEET.instances
        )
        assert summary.ttft_mean_s > 0.98 * bound.summary.ttft_mean_s
        assert summary.hit_rate <= bound.summary.hit_rate + 0.01


def test_nothing_offered_is_no_rate() -> None:
    """Of no outcomes."""
    assert measure_offered_rate([]) == 0.0


def tight_trace(requests: int = 60) -> Trace:
    """Different prompts of eleven blocks and long answers: half a dozen fill a small pool."""
    rows = [
        {"timestamp": 0, "input_length": 11 * 512, "output_length": 900, "hash_runs": [100 * (number + 1), 11]}
        for number in range(requests)
    ]
    return parse_trace(lines(*rows), name="tight")


@pytest.mark.parametrize("instances", [2, 8])
def test_an_engine_that_waits_for_blocks_goes_on_when_another_frees_them(instances: int) -> None:
    """Every request of a trace that fits is served, however small the pool."""
    trace = tight_trace()
    fleet = ReplayFleet(instances=instances, capacity_tokens=15 * 512)
    bound = measure_bound(trace, fleet, 0.9)
    outcomes = play_on_pool(bound.trace, bound.pace, fleet)
    assert len(outcomes) == trace.requests
    assert all(each.first_token_at is not None and each.finished_at is not None for each in outcomes)


@pytest.mark.parametrize("scheduling", Scheduling)
@pytest.mark.parametrize("capacity_tokens", [15 * 512, 24 * 512])
def test_the_pool_goes_on_whatever_its_engines_are_like(capacity_tokens: int, scheduling: Scheduling) -> None:
    """Small caches, few slots, small blocks, a threshold and reused answers: every request that fits is served."""
    trace = tight_trace()
    fleet = replace(
        ENGINES["h100"], instances=3, capacity_tokens=capacity_tokens, block_size=64, max_sequences=4,
        long_prefill_token_threshold=1024, scheduling=scheduling,
    )  # fmt: skip
    bound = measure_bound(trace, fleet, 0.9)
    outcomes = play_on_pool(bound.trace, bound.pace, fleet)
    assert all(each.first_token_at is not None and each.finished_at is not None for each in outcomes)


def test_prompts_too_large_for_any_engine_are_rejected_by_the_pool_as_well() -> None:
    """The reference is of the requests that a real fleet can serve."""
    rows = [
        {"timestamp": 500 * number, "input_length": size, "output_length": 10, "hash_runs": [100 * (number + 1), 1]}
        for number, size in enumerate((600, 40 * 512, 700))
    ]
    fleet = ReplayFleet(instances=8, capacity_tokens=20 * 512)
    trace = parse_trace(lines(*rows), name="one too long")
    bound = measure_bound(trace, fleet, 0.5)
    outcomes = play_on_pool(bound.trace, bound.pace, fleet)
    assert [each.first_token_at is not None for each in outcomes] == [True, False, True]
