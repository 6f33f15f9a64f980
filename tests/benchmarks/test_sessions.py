"""The batches of `benchmarks.sessions`, and its report."""

from __future__ import annotations

import pytest

from benchmarks.sessions import CELLS, Cell, chat_figures, run_cell
from benchmarks.sessions_report import as_markdown
from benchmarks.sessions_shapes import SHAPES, needed_tokens
from kvproxy.lab.replay.results import ReplayOutcome


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_the_same_for_the_same_seed(shape: str) -> None:
    """And another one for another seed; agents are among its sessions, which begin at 0."""
    trace = SHAPES[shape](12, 1)
    assert trace == SHAPES[shape](12, 1) != SHAPES[shape](12, 2)
    assert trace.sessions[0].start_s == 0.0
    assert sum(each.tenant == "agent" for each in trace.sessions) == 12
    assert all(
        len(turn.blocks) <= turn.prompt_tokens // trace.block_size for one in trace.sessions for turn in one.turns
    )


def test_prompts_grow_within_a_session() -> None:
    """Each turn begins with the blocks of the one before; a fork with its parent's."""
    for session in SHAPES["forks"](8, 1).sessions:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.blocks[: len(before.blocks)] == before.blocks


def test_shared_contexts_are_needed_once() -> None:
    """Two agents need less than twice what one does, by their system prompt."""
    one, two = (needed_tokens(SHAPES["agents"](count, 1)) for count in (1, 2))
    assert one < two
    assert needed_tokens(SHAPES["agents"](64, 1)) == pytest.approx(4 * 400_000, rel=0.05)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cells_have_names_of_their_own(cell: Cell) -> None:
    """By which a run is asked for and found again."""
    assert Cell.parse(str(cell)) == cell
    assert [str(each) for each in CELLS].count(str(cell)) == 1


def test_the_memory_of_a_cell_holds_every_prompt() -> None:
    """Also where the ratio alone would make it too small, as with giants."""
    trace, fleet = Cell("giant", 2, 50.0).draw(1)
    assert fleet.capacity_tokens >= max(turn.prompt_tokens for one in trace.sessions for turn in one.turns)


def test_a_run_and_its_report() -> None:
    """Every figure of the table is in the row; chats have figures of their own, with which agents' are not mixed."""
    row = run_cell(Cell("mixed", 1, 0.25), "places=2", 1)
    assert (row["cell"], row["policy"], row["agents"], row["ended"]) == ("mixed-1-0.25", "places=2", 4, 4)
    text = as_markdown([row, {**row, "seed": 2}])
    assert "| 1 engines, 4 agents |" in text
    assert "chat 99 %" in text
    assert chat_figures([]) == {}
    assert chat_figures([ReplayOutcome(0.0, 10, first_token_at=2.0)]) == {"chat_mean_s": 2.0, "chat_p99_s": 2.0}


def test_missed_targets_are_bold() -> None:
    """Cell by cell, once there are runs with admission of sessions and without."""
    row = {
        "cell": "agents-1-2", "seed": 1, "agents": 4, "needed": 2.0, "sessions_per_hour": 100.0, "session_mean_s": 40.0,
        "session_p90_s": 80.0, "first_answer_p90_s": 1.0, "wait_max_s": 9.0, "hit_rate": 0.95, "fairness": 0.8,
        "wait_by_length": 0.0, "failed": 0.0,
    }  # fmt: skip
    on, off, peer = ({**row, "policy": name} for name in ("kv_aware", "kv_aware+no_admission", "vllm_router"))
    assert "## Wanted" not in as_markdown([on, peer])
    runs = [on, {**off, "session_mean_s": 100.0}, {**peer, "session_p90_s": 60.0, "fairness": 0.95}]
    text = as_markdown(runs)
    assert "| agents-1-2 | | 0.95 | 0.40 | 1.00 | 1.00 | **1.33** | **0.80** | 0.00 | |" in text
    assert "| agents-1-2 | fair | **0.80** | | | 0.95 | **0.80** |" in text
    assert "## Other draws" not in text
    second = [{**one, "seed": 2, "fairness": 0.9} for one in (on, off)]
    assert "| agents-1-2 | 0.40 1.00 | 1.00 1.00 | 0.95 0.95 | 0.80 0.90 | |" in as_markdown([*runs, *second])
