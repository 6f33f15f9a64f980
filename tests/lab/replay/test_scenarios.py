"""The named scenarios: what is drawn is what is stated, and is the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.scenarios import SCENARIOS, Scenario, UnknownScenario, find_scenarios
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Half, Trace


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: str(scenario.name))
def test_a_scenario_is_the_same_for_the_same_half(scenario: Scenario) -> None:
    """The halves are two draws of one distribution; sessions are in order and begin at 0."""
    report, tuning = scenario.draw(Half.REPORT), scenario.draw(Half.TUNING)
    assert report == scenario.draw(Half.REPORT)
    assert report.sessions != tuning.sessions
    assert (report.half, tuning.half) == (Half.REPORT, Half.TUNING)
    starts = [session.start_s for session in report.sessions]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert 0.8 < report.requests / tuning.requests < 1.25
    assert isinstance(scenario.disturb(ReplayFleet(instances=4)), ReplayFleet)


def lengths(trace: Trace) -> list[int]:
    """Of the prompts."""
    return [turn.prompt_tokens for session in trace.sessions for turn in session.turns]


def test_a_herd_comes_at_once() -> None:
    """256 requests with one beginning before any other."""
    trace = SCENARIOS["herd"].draw(Half.REPORT)
    assert Counter(session.start_s for session in trace.sessions)[0.0] == 256
    assert len({session.turns[0].blocks[15] for session in trace.sessions}) == 1


def test_unique_prompts_share_nothing() -> None:
    """Not even a first block."""
    assert SCENARIOS["unique"].draw(Half.REPORT).hit_ceiling() == 0.0


def test_one_prompt_in_twenty_is_long() -> None:
    """1,000 times as long as the others."""
    counts = Counter(lengths(SCENARIOS["bimodal"].draw(Half.REPORT)))
    assert set(counts) == {100, 100_000}
    assert counts[100_000] / counts.total() == pytest.approx(0.05, abs=0.015)


def test_chats_ask_shortly_and_are_answered_at_length() -> None:
    """Each turn repeats what was said before it."""
    trace = SCENARIOS["chats"].draw(Half.REPORT)
    turns = [turn for session in trace.sessions for turn in session.turns]
    assert len(turns) / len(trace.sessions) == pytest.approx(3.5, rel=0.1)
    assert sum(turn.output_tokens for turn in turns) / len(turns) == pytest.approx(270, rel=0.1)
    several = next(session.turns for session in trace.sessions if len(session.turns) > 2)
    for before, after in pairwise(several):
        assert after.blocks[: len(before.blocks)] == before.blocks
        assert after.prompt_tokens > before.prompt_tokens + before.output_tokens


def test_a_hot_set_flips_in_the_middle() -> None:
    """Nothing of the second half of the run was asked for in the first."""
    trace = SCENARIOS["hot_set_flips"].draw(Half.REPORT)
    early, late = (
        {session.turns[0].blocks[0] for session in trace.sessions if (session.start_s < 299) is first}
        for first in (True, False)
    )
    assert len(early) > 150
    assert len(early & late) < 10


def test_a_burst_is_ten_times_the_rate() -> None:
    """For a thirtieth of the run."""
    starts = [session.start_s for session in SCENARIOS["burst"].draw(Half.REPORT).sessions]
    during = sum(200 <= at < 220 for at in starts) / 20
    outside = sum(300 <= at < 500 for at in starts) / 200
    assert during / outside == pytest.approx(10, rel=0.25)


def test_agents_fork() -> None:
    """Several sessions go on from one history."""
    trace = SCENARIOS["agents"].draw(Half.REPORT)
    heads = Counter(session.turns[0].blocks[12:14].tobytes() for session in trace.sessions)
    assert any(count >= 2 for head, count in heads.items() if head)


def test_conversations_grow_by_question_and_answer() -> None:
    """Each turn repeats what was said before it, and about 11,000 tokens are asked at a time."""
    trace = SCENARIOS["quarter_chats"].draw(Half.REPORT)
    for session in trace.sessions:
        for before, after in pairwise(session.turns):
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.prompt_tokens > len(before.blocks) * trace.block_size
    assert sum(lengths(trace)) / trace.requests == pytest.approx(11_000, rel=0.2)


@pytest.mark.parametrize("name", ["quarter_cache", "quarter_chats"])
def test_caches_of_a_quarter_hold_less_than_comes_again(name: str) -> None:
    """A fifth of the distinct prompt tokens fit the whole fleet, so that placement decides what is kept."""
    scenario, plain = SCENARIOS[name], ReplayFleet()
    trace, fleet = scenario.draw(Half.REPORT), scenario.disturb(plain)
    assert fleet.capacity_tokens * 4 == plain.capacity_tokens
    distinct = len({block for session in trace.sessions for turn in session.turns for block in turn.blocks})
    assert distinct * trace.block_size > 5 * fleet.instances * fleet.capacity_tokens


def test_a_tenant_is_greedy() -> None:
    """Most of the prompt tokens are its own."""
    tokens: Counter[str] = Counter()
    for session in SCENARIOS["greedy_tenant"].draw(Half.REPORT).sessions:
        tokens[session.tenant] += sum(turn.prompt_tokens for turn in session.turns)
    assert len(tokens) == 4
    assert tokens["greedy"] > 0.5 * tokens.total()


def test_engines_that_report_nothing_are_believed_to_have_reused_nothing() -> None:
    """The proxy hears 0; the report knows what was reused."""
    trace = SCENARIOS["reports_nothing"].draw(Half.TUNING).cut(200)
    told: list[int] = []
    for fleet in (ReplayFleet(instances=2), SCENARIOS["reports_nothing"].disturb(ReplayFleet(instances=2))):
        policy = PolicySpec.parse("kv_aware").make(rng=Random(1))
        policy.observe_reuse = lambda endpoint, predicted, cached, now: told.append(cached)  # type: ignore[method-assign]
        outcomes = play_policy(trace, Pace(), fleet, policy)
        assert sum(each.cached_tokens for each in outcomes) > 0
        assert (sum(told) > 0) is fleet.reports_cached
        told.clear()


def test_a_name_that_is_none_is_an_error() -> None:
    """With the nearest that is one."""
    with pytest.raises(UnknownScenario, match="did you mean 'bimodal'"):
        find_scenarios("herd,bimodel")
