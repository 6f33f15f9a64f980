"""Reading traces, this project's and Mooncake's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvproxy.lab.replay.settings import Pace
from kvproxy.lab.replay.trace import TraceError, parse_trace, read_trace
from tests.lab.replay.traces import chat_trace, lines, shared_prefix_trace

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"


def test_runs_are_unrolled_and_only_whole_blocks_kept() -> None:
    """A partial last block can never be reused."""
    trace = parse_trace(
        lines({"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_runs": [0, 1, 28, 2]}), name="t"
    )
    (session,) = trace.sessions
    assert session.start_s == 0.0
    assert list(session.turns[0].blocks) == [0, 28]
    assert session.turns[0].prompt_tokens == 1100


def test_mooncake_originals_are_read() -> None:
    """One block id each, 512 tokens a block, no meta line."""
    row = {"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [46, 47]}
    trace = parse_trace([json.dumps(row), "", json.dumps({**row, "timestamp": 3000})], name="mooncake")
    assert (trace.block_size, trace.requests, trace.has_sessions) == (512, 2, False)
    assert list(trace.sessions[1].turns[0].blocks) == [46, 47]
    assert trace.sessions[1].start_s == 3.0
    assert trace.sessions[1].turns[0].output_tokens == 1


def test_turns_belong_to_their_session() -> None:
    """A turn without a timestamp follows the one before it."""
    trace = chat_trace(sessions=2, turns=3)
    assert trace.has_sessions
    assert [turn.delay_s for turn in trace.sessions[0].turns] == [0.0, 1.5, 1.5]
    assert [at for at, _ in trace.turns_in_nominal_order(service_s=1.0)] == [0.0, 2.0, 2.5, 4.5, 5.0, 7.0]


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", '{"timestamp": 0}', '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
     '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [-1]}',
     '{"session_id": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
     '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_runs": [1]}'],
)  # fmt: skip
def test_a_bad_line_is_named(bad: str) -> None:
    """With its number, whatever is wrong with it."""
    with pytest.raises(TraceError, match="trace, line 2"):
        parse_trace([lines()[0], bad], name="trace")


def test_a_file_without_requests_is_no_trace() -> None:
    """Rather an error than a report of nothing."""
    with pytest.raises(TraceError, match="no requests"):
        parse_trace(lines(), name="empty")


def test_files_may_be_gzipped_or_not(tmp_path: Path) -> None:
    """By their ending; the name is the file's."""
    text = "\n".join(lines({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}))
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "a.jsonl").name == "a"
    assert read_trace(tmp_path / "b.jsonl.gz").requests == 1


def test_the_ceiling_is_what_one_endless_cache_would_hit() -> None:
    """The last token of a prompt is always computed, so a whole repeat misses its last block."""
    row = {"input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace = parse_trace(lines({"timestamp": 0, **row}, {"timestamp": 1, **row}), name="t")
    assert trace.hit_ceiling() == pytest.approx(512 / 2048)


def test_cutting_keeps_the_first_sessions() -> None:
    """Whole sessions, the last one possibly shortened."""
    trace = chat_trace(sessions=3, turns=4).cut(6)
    assert [len(session.turns) for session in trace.sessions] == [4, 2]


def test_clones_share_what_sessions_share_and_nothing_else() -> None:
    """A copy is another user: the system prompt is common, the conversation is not."""
    trace = chat_trace(sessions=20, turns=2)
    cloned = trace.clone(3)
    assert cloned.requests == 3 * trace.requests
    lasts = [session.turns[-1].blocks for session in cloned.sessions]
    assert {blocks[0] for blocks in lasts} == {0}
    assert len({blocks[1] for blocks in lasts}) == 60
    assert cloned.hit_ceiling() == pytest.approx(trace.hit_ceiling(), rel=0.05)
    assert trace.clone(1) is trace


def test_open_loop_fixes_every_arrival_closed_loop_the_first() -> None:
    """Scale stretches session starts and leaves delays alone."""
    trace = chat_trace(sessions=2, turns=2)
    assert Pace(scale=2.0).arrivals(trace) == [(0.0, 0, 0), (4.0, 1, 0)]
    assert Pace(2.0, closed_loop=False, service_s=1.0).arrivals(trace) == [
        (0.0, 0, 0), (2.5, 0, 1), (4.0, 1, 0), (6.5, 1, 1)
    ]  # fmt: skip
    assert Pace(2.0, service_s=1.0).duration_s(trace) == 6.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "requests", "ceiling"),
    [("conv_dev", 4665, 0.339), ("msyn_dev", 2000, 0.336), ("agent_dev", 2020, 0.943), ("cc_dev", 5245, 0.949),
     ("toolagent_like_dev", 7314, 0.640)],
)  # fmt: skip
def test_the_shipped_traces_are_what_their_readme_says(name: str, requests: int, ceiling: float) -> None:
    """Number of requests and infinite-cache hit rate."""
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    assert trace.requests == requests
    assert trace.hit_ceiling() == pytest.approx(ceiling, abs=0.002)


def test_the_small_trace_of_these_tests_has_reuse() -> None:
    """Or the tests that compare policies on it would compare nothing."""
    assert shared_prefix_trace().hit_ceiling() > 0.6
