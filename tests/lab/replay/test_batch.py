"""A batch of sessions that is played once."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from benchmarks.sessions import RULES
from kvproxy.cluster.routing.fair_queue import QueueSettings
from kvproxy.lab.replay import compare
from kvproxy.lab.replay.batch import BatchReport, compare_batch, measure_alone, summarize_batch
from kvproxy.lab.replay.compare import ComparisonPlan, PolicySpec, play_policy
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace, parse_trace
from kvproxy.lab.simulator.timing import EngineTiming
from tests.lab.replay.test_command import replay
from tests.lab.replay.traces import agents, chat_trace, lines

FLEET = ReplayFleet(instances=2, capacity_tokens=65_536)


def batch(trace: Trace, *, fleet: ReplayFleet = FLEET, at_once: int = 0, policies: str = "kv_aware") -> BatchReport:
    """Play it."""
    plan = ComparisonPlan(fleet, [PolicySpec.parse(name) for name in policies.split(",")])
    return compare_batch(trace, plan, sessions_at_once=at_once, err=io.StringIO())


def outcome(session: int, at: float, *, wait: float = 0.0, end: float = 0.0, prompt: int = 1000) -> ReplayOutcome:
    """Return an answered request: it waits, then 1 s of prefill; `end` is that of its answer."""
    admitted = at + wait
    return ReplayOutcome(
        at, prompt, 0, cached_tokens=prompt // 2, admitted_at=admitted, first_token_at=admitted + 1.0,
        finished_at=end, session=session,
    )  # fmt: skip


def spans(outcomes: Sequence[ReplayOutcome]) -> list[tuple[float, float]]:
    """Return begin and end of each session, in order of begins."""
    ends: dict[int, tuple[float, float]] = {}
    for each in outcomes:
        assert each.finished_at is not None
        first, last = ends.get(each.session, (each.arrived_at, each.finished_at))
        ends[each.session] = min(first, each.arrived_at), max(last, each.finished_at)
    return sorted(ends.values())


def test_a_session_begins_as_another_ends() -> None:
    """One at a time: each first request comes at the end of the session before, its turns a pause after each answer."""
    trace = chat_trace(sessions=5, turns=3)
    pace = Pace(sessions_at_once=1)
    outcomes = play_policy(trace, pace, FLEET, PolicySpec.parse("round_robin").make(rng=Random(1)))
    assert len(outcomes) == trace.requests
    played = spans(outcomes)
    assert all(later[0] == pytest.approx(max(earlier[1], 0.0)) for earlier, later in pairwise(played))


def test_no_more_sessions_than_allowed_are_under_way() -> None:
    """At no moment, and as many as allowed while some are left."""
    trace = parse_trace(
        lines(*({"timestamp": 0, "input_length": 900, "output_length": 50 + number, "hash_runs": [number, 1]}
                for number in range(9))),
        name="singles",
    )  # fmt: skip
    outcomes = play_policy(trace, Pace(sessions_at_once=3), FLEET, PolicySpec.parse("round_robin").make(rng=Random(1)))
    played = spans(outcomes)
    moments = sorted({begin for begin, _ in played})
    assert max(sum(begin <= moment < end for begin, end in played) for moment in moments) == 3
    assert len(outcomes) == 9


def test_a_batch_is_played_once_at_its_own_pace() -> None:
    """No repetition and no load: as many requests as the trace has, the sessions beginning when it says."""
    trace = chat_trace(sessions=4, turns=2)
    report = batch(trace)
    (figures,) = report.policies.values()
    assert (report.requests, figures.sessions, figures.ended, figures.failed) == (8, 4, 4, 0)
    assert figures.makespan_s == pytest.approx(6.0 + figures.session_mean_s, abs=1.0)  # begins 0, 2, 4 and 6 s
    assert figures.sessions_per_hour == pytest.approx(3600 * 4 / figures.makespan_s)


def test_a_session_alone_is_not_slowed_down() -> None:
    """A fleet with nothing else to do takes as long as the reckoning of sessions that are alone."""
    trace = chat_trace(sessions=1, turns=4)
    (figures,) = batch(trace).policies.values()
    assert figures.session_mean_s == pytest.approx(measure_alone(trace, FLEET)[0])
    assert figures.session_mean_s > 3 * 1.5  # pauses count


def test_figures_of_a_batch() -> None:
    """Session time, waits, fairness of slowdowns and correlation, by hand."""
    trace = chat_trace(sessions=2, turns=2)
    outcomes = [
        outcome(0, 0.0, end=10.0, prompt=1000),
        outcome(1, 0.0, wait=4.0, end=10.0, prompt=3000),
        outcome(0, 12.0, end=20.0, prompt=1000),
        outcome(1, 15.0, wait=8.0, end=60.0, prompt=5000),
    ]
    figures = summarize_batch(outcomes, trace, [10.0, 10.0])
    assert (figures.makespan_s, figures.sessions_per_hour) == (60.0, 120.0)
    assert (figures.session_mean_s, figures.session_p90_s, figures.wait_max_s) == (40.0, 60.0, 8.0)
    assert (figures.first_answer_p90_s, figures.ttft_mean_s, figures.hit_rate) == (5.0, 4.0, 0.5)
    assert figures.fairness == pytest.approx((2.0 + 6.0) ** 2 / (2 * (4.0 + 36.0)))
    assert figures.wait_by_length == pytest.approx(1.0)


def test_a_request_that_was_refused_waits_anew() -> None:
    """Its client may stay away; its whole time counts for its session all the same."""
    again = replace(outcome(0, 0.0, wait=700.0, end=710.0), refusals=1, came_again_at=540.0)
    figures = summarize_batch([again], chat_trace(sessions=1, turns=1), [10.0])
    assert (figures.wait_max_s, figures.refused, figures.session_mean_s) == (160.0, 1, 710.0)


def test_sessions_are_refused_after_the_longest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none waits longer at a time."""
    monkeypatch.setattr(compare, "QueueSettings", partial(QueueSettings, max_wait_s=3.0))
    trace = agents(24, 12, apart_ms=1000)
    fleet = ReplayFleet(
        instances=1, capacity_tokens=8192, reuse_outputs=True, timing=EngineTiming(prefill_tokens_per_s=1000.0)
    )
    policy = PolicySpec.parse("kv_aware").make(rng=Random(1))
    outcomes = play_policy(trace, Pace(), fleet, policy, PolicySpec.parse("kv_aware"), seed=1)
    figures = summarize_batch(outcomes, trace, measure_alone(trace, fleet))
    assert figures.failed == 0
    assert figures.refused > 0
    waits_s = [
        one.placed_at - (one.arrived_at if one.came_again_at is None else one.came_again_at)
        for one in outcomes
        if one.placed_at is not None
    ]
    assert max(waits_s) == pytest.approx(3.0, abs=0.01)


def test_a_session_that_lost_a_request_is_no_session_that_ended() -> None:
    """It counts as failed; its time is not one of a session, and equal waits correlate with nothing."""
    trace = chat_trace(sessions=2, turns=2)
    outcomes = [outcome(0, 0.0, end=2.0), outcome(0, 3.0, end=9.0), outcome(1, 0.0, end=2.0), ReplayOutcome(4.0, 100)]
    figures = summarize_batch(outcomes, trace, [1.0, 1.0])
    assert (figures.sessions, figures.ended, figures.failed) == (2, 1, 1)
    assert (figures.session_mean_s, figures.wait_by_length) == (9.0, 0.0)


def test_nothing_answered_has_figures_too() -> None:
    """Zeros, not a traceback."""
    trace = chat_trace(sessions=1, turns=1)
    figures = summarize_batch([ReplayOutcome(0.0, 100, session=0)], trace, [1.0])
    assert (figures.ended, figures.failed, figures.sessions_per_hour, figures.makespan_s) == (0, 1, 0.0, 0.0)


def test_memory_that_is_short_costs_hits() -> None:
    """The engines forget what has been idle the longest: with a quarter of the memory fewer prefixes are found."""
    trace = chat_trace(sessions=16, turns=4)
    roomy, short = (
        next(iter(batch(trace, fleet=ReplayFleet(instances=1, capacity_tokens=tokens)).policies.values()))
        for tokens in (262_144, 8_192)
    )
    assert short.hit_rate < roomy.hit_rate
    assert short.session_mean_s > roomy.session_mean_s


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Two sessions of two turns."""
    rows = [
        {**({"timestamp": 500 * number} if turn == 0 else {"delay": 100}), "session_id": number,
         "input_length": 1100 + 600 * turn, "output_length": 10, "hash_runs": [100 * number, 2 + turn]}
        for number in range(2) for turn in range(2)
    ]  # fmt: skip
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(lines(*rows)))
    return path


def test_a_batch_by_command(trace_file: Path, tmp_path: Path) -> None:
    """Table and JSON, every policy beside the baseline."""
    file = tmp_path / "batch.json"
    status, table, _ = replay(
        trace_file, "--once", "--sessions-at-once", "1", "--policy", "round_robin,kv_aware", "--instances", "2",
        "--seeds", "2", "--json", file,
    )  # fmt: skip
    assert status == 0
    assert table.startswith("small, both halves: 2 sessions once, 1 at once, 4 requests, 2 instances")
    assert [line.split()[0] for line in table.splitlines()[2:4]] == ["round_robin", "kv_aware"]
    figures = json.loads(file.read_text())
    assert (figures["sessions"], figures["sessions_at_once"], figures["requests"]) == (2, 1, 4)
    assert figures["policies"]["round_robin"]["vs_baseline"] == 1.0
    assert figures["policies"]["kv_aware"]["sessions_per_hour"] > 0
    assert len(figures["policies"]["kv_aware"]["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--sessions-at-once", "2"), "add --once"), (("--once", "--sessions-at-once", "-1"), "at least 1"),
     (("--once", "--sessions-at-once", "2", "--open-loop"), "--open-loop"), (("--once", "--load", "2"), "--load"),
     (("--once", "--plot", "page.html"), "--plot"), (("--policy", "places"), "add --once"),
     (("--once", "--url", "http://127.0.0.1:9"), "--url")],
)  # fmt: skip
def test_options_that_do_not_go_with_a_batch(trace_file: Path, arguments: tuple[str, ...], message: str) -> None:
    """Error messages that name the option."""
    status, table, errors = replay(trace_file, *arguments)
    assert (status, table) == (1, "")
    assert message in errors


def test_rules_of_sessions_stand_beside_policies(trace_file: Path) -> None:
    """By their names; they have the choice, and so no policy."""
    status, table, _ = replay(trace_file, "--once", "--policy", f"kv_aware,{RULES['vllm_router']},places=1")
    assert status == 0
    assert [line.split()[0] for line in table.splitlines()[2:5]] == [
        "kv_aware", "VllmRouter", "places=1",
    ]  # fmt: skip


def test_the_best_number_of_places_may_be_listed_too(trace_file: Path) -> None:
    """It is one row, whatever the best number is."""
    listed = ",".join(f"places={number}" for number in range(1, 9))
    status, table, errors = replay(trace_file, "--once", "--instances", "1", "--policy", f"places,{listed}")
    assert status == 0, errors
    assert len({line.split()[0] for line in table.splitlines()[2:10]}) == 8


def test_failed_requests_stand_beside_the_name(trace_file: Path) -> None:
    """As in the other tables."""
    status, table, _ = replay(trace_file, "--once", "--policy", "round_robin", "--capacity-tokens", "1536")
    assert status == 0
    assert "round_robin (2 failed)" in table
