"""The figures of a run, their ratios, and the halves of a trace."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kvproxy.lab.replay.report import FIGURES, MORE_FIGURES, ReplayReport
from kvproxy.lab.replay.results import GoodputLimits, Ratio, ReplayOutcome, mean_ratio, summarize_outcomes
from kvproxy.lab.replay.trace import Half, Trace, TraceError, parse_trace, read_trace
from kvproxy.lab.simulator.timing import TokenGaps
from kvproxy.operate.log_lines import align_columns
from tests.lab.replay.traces import chat_trace, lines

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"


def answered(
    at: float = 0.0, *, ttft: float = 1.0, tokens: int = 11, tpot: float = 0.05, session: int = 0, tenant: str = ""
) -> ReplayOutcome:
    """Return a request that was served."""
    first = at + ttft
    return ReplayOutcome(
        at, 100, 0, first_token_at=first, finished_at=first + tpot * (tokens - 1), output_tokens=tokens,
        session=session, tenant=tenant,
    )  # fmt: skip


def test_a_request_that_failed_is_no_good_answer() -> None:
    """Goodput is over all that were asked; other figures are over those that were answered."""
    summary = summarize_outcomes([answered(), ReplayOutcome(0.0, 100)], 1)
    assert (summary.failed, summary.goodput, summary.ttft_mean_s) == (1, 0.5, 1.0)


@pytest.mark.parametrize(
    ("outcome", "good"),
    [(answered(ttft=1.9, tpot=0.09), True), (answered(ttft=2.1), False), (answered(tpot=0.11), False),
     (answered(tokens=1, tpot=9.0), True)],
)  # fmt: skip
def test_goodput_has_two_limits(outcome: ReplayOutcome, good: bool) -> None:
    """TTFT under 2 s and TPOT under 100 ms; an answer of one token has no TPOT."""
    assert GoodputLimits().holds(outcome) is good


def test_a_session_lasts_from_its_start_to_its_last_answer() -> None:
    """Pauses between its turns count."""
    turns = [answered(0.0, session=1), answered(20.0, session=1), answered(5.0, session=2)]
    assert summarize_outcomes(turns, 1).session_mean_s == pytest.approx((21.5 + 1.5) / 2)


@pytest.mark.parametrize("named", [True, False])
def test_fairness_is_over_tenants_where_there_are_any(named: bool) -> None:
    """Jain's index: 1/n where one of n waits and the others do not; sessions stand in for tenants."""
    waits = [(1, 8.0), (2, 0.0), (3, 0.0), (4, 0.0)]
    outcomes = [answered(ttft=ttft, session=n, tenant=f"t{n}" if named else "") for n, ttft in waits]
    assert summarize_outcomes(outcomes, 1).fairness == pytest.approx(0.25)
    one = [answered(ttft=ttft, session=n, tenant="t") for n, ttft in waits]
    assert summarize_outcomes(one, 1).fairness == pytest.approx(1.0)


def test_times_between_tokens_are_weighed_by_tokens() -> None:
    """One slow token among a hundred is the p99; the figure is within a per cent."""
    gaps = TokenGaps()
    gaps.add(0.01, 98)
    gaps.add(0.5)
    gaps.add(0.7)
    assert gaps.percentile(0.5) == pytest.approx(0.01, rel=0.01)
    assert gaps.percentile(0.985) == pytest.approx(0.5, rel=0.01)
    assert gaps.percentile(1.0) == pytest.approx(0.7, rel=0.01)
    assert TokenGaps().percentile(0.99) == 0.0


def test_a_ratio_is_the_geometric_mean_with_the_spread_of_its_seeds() -> None:
    """2 and 1/2 are 1; that cells differ is no error, that seeds differ is."""
    assert mean_ratio([[(2.0, 1.0)], [(1.0, 2.0)]]) == Ratio(pytest.approx(1.0))
    assert mean_ratio([[(2.0, 1.0), (4.0, 2.0)], [(1.0, 2.0), (2.0, 4.0)]]) == (pytest.approx(1.0), pytest.approx(0.0))
    value, error = mean_ratio([[(1.0, 1.0), (1.21, 1.0)]])
    assert (value, error) == (pytest.approx(1.1), pytest.approx(1.1 * 0.0953, rel=1e-3))
    assert mean_ratio([]) == mean_ratio([[(0.0, 1.0)]]) == Ratio(0.0)


def test_a_cell_that_was_run_once_scatters_like_the_others() -> None:
    """Its error is not nothing."""
    repeated = [(1.0, 1.0), (1.21, 1.0)]
    _, alone = mean_ratio([repeated])
    _, both = mean_ratio([repeated, [(1.1, 1.0)]])
    assert alone is not None
    assert both is not None
    assert both == pytest.approx(alone * (0.5 + 1.0) ** 0.5 / 2 / 0.5**0.5, rel=1e-3)


def test_the_table_fits_a_terminal() -> None:
    """A hundred columns, with the longest policy's name and every spread."""
    outcomes = [answered(123.0 * n, ttft=99.0 + n, tpot=0.4, session=n) for n in range(50)]
    runs = [summarize_outcomes(outcomes[n:], 1) for n in range(3)]
    policies = {"kv_aware+queue+priority": runs, "lmetric": runs[::-1]}
    limits = {"goodput": {"ttft_s": 2.0, "tpot_s": 0.1}}
    report = ReplayReport("conv_dev", Half.REPORT, 16, 0.9, 4665, 0.5, runs[0], "lmetric", policies, limits, 2332)
    text = report.render_table(all_figures=True)
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("conv_dev, report half: ")
    shown = {column.title for column in (*FIGURES, *MORE_FIGURES)}
    assert {"TTFT", "TTFT p50", "p90", "p99", "longest", "goodput", "session", "fairness", "busy"} <= shown
    assert align_columns([["a", "b"], ["c", "ddd"]]) == ["a    b", "c  ddd"]


def test_former_names_of_the_reference_are_kept_in_json() -> None:
    """Scripts that read `bound` go on; so does a report without a reference."""
    run = summarize_outcomes([answered()], 1)
    report = ReplayReport("t", Half.BOTH, 1, 0.7, 1, 0.0, run, "p", {"p": [run]}, {})
    written = report.as_json()
    assert written["bound"] == {"ttft_mean_s": 1.0, "ttft_p99_s": 1.0}
    assert written["policies"]["p"]["vs_bound"] == written["policies"]["p"]["vs_reference"] == pytest.approx(1.0)
    assert (written["half"], len(written["policies"]["p"]["runs"])) == ("both", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv_dev", "msyn_dev", "toolagent_like_dev", "cc_dev", "agent_dev"])
def test_halves_share_only_what_is_common(name: str) -> None:
    """Every request is in one half, no conversation in both, and each half still hits as the whole does."""
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    halves = [trace.take_half(half) for half in (Half.TUNING, Half.REPORT)]
    assert sum(half.requests for half in halves) == trace.requests
    for half in halves:
        assert half.requests / trace.requests == pytest.approx(0.5, abs=0.07)
        assert half.hit_ceiling() == pytest.approx(trace.hit_ceiling(), abs=0.03)
        assert half.sessions[0].start_s == 0.0
        assert all(one.start_s <= two.start_s for one, two in pairwise(half.sessions))
    if not trace.has_sessions:
        mine, other = ({block for session in half.sessions for block in session.turns[0].blocks} for half in halves)
        assert len(mine & other) < 0.001 * len(mine | other)


def test_halves_are_by_conversation() -> None:
    """Even ones tune, odd ones report; both is the trace as it is; one conversation has no second half."""
    trace = chat_trace(sessions=5, turns=2)
    assert trace.take_half(Half.BOTH) is trace
    tuning, report = trace.take_half(Half.TUNING), trace.take_half(Half.REPORT)
    assert [len(half.sessions) for half in (tuning, report)] == [3, 2]
    assert [half.half for half in (tuning, tuning.cut(1), report.clone(2))] == [Half.TUNING, Half.TUNING, Half.REPORT]
    assert report.sessions[0].turns == trace.sessions[1].turns
    with pytest.raises(TraceError, match="no conversation is in the report half"):
        chat_trace(sessions=1).take_half(Half.REPORT)


def test_single_requests_that_share_a_prefix_are_one_conversation() -> None:
    """Or a half would miss what the other was asked before; a prefix of very many is no conversation."""
    rows = [
        {"timestamp": number, "input_length": 3 * 512, "output_length": 1, "hash_runs": [0, 1, 1000 + number // 3, 1]}
        for number in range(300)
    ]
    trace: Trace = parse_trace(lines(*rows), name="chains")
    held = [{s.turns[0].blocks[1] for s in trace.take_half(half).sessions} for half in (Half.TUNING, Half.REPORT)]
    assert [len(each) for each in held] == [50, 50]
    assert not held[0] & held[1]


def test_tenants_are_read() -> None:
    """Where the trace names them."""
    rows = [
        {"timestamp": 0, "session_id": 1, "tenant": "a", "input_length": 10, "output_length": 1, "hash_ids": []},
        {"timestamp": 9, "session_id": 2, "input_length": 10, "output_length": 1, "hash_ids": []},
    ]
    assert [session.tenant for session in parse_trace(lines(*rows), name="t").sessions] == ["a", ""]
