"""Engines' view of a trace: their own blocks, and those that answers leave behind."""

from __future__ import annotations

import pytest

from kvproxy.lab.replay.settings import EngineBlocks
from kvproxy.lab.replay.trace import Trace, TraceError, parse_trace
from tests.lab.replay.traces import chat_trace, lines


def test_a_traces_blocks_may_be_several_of_an_engines() -> None:
    """Each into as many ids of its own; the prompt and what is known of it stay."""
    trace = parse_trace(lines({"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [3, 9]}), name="t")
    turn = EngineBlocks(trace, 128).turn(0, 0)
    assert list(turn.blocks) == [12, 13, 14, 15, 36, 37, 38, 39]
    assert turn.prompt_tokens == 1100
    assert EngineBlocks(trace).turn(0, 0) == EngineBlocks(trace, 512).turn(0, 0) == trace.sessions[0].turns[0]
    assert (EngineBlocks(trace, 128).size, EngineBlocks(trace).size) == (128, 512)


@pytest.mark.parametrize("block_size", [100, 1024])
def test_blocks_that_do_not_divide_the_traces_are_refused(block_size: int) -> None:
    """With both sizes."""
    with pytest.raises(TraceError, match=f"512 tokens are not made of {block_size}"):
        EngineBlocks(chat_trace(), block_size)


def two_turns(first: list[int], second: list[int], *, prompt: int, output: int, longer: int) -> Trace:
    """Return a conversation in blocks of 512."""
    return parse_trace(
        lines(
            {"timestamp": 0, "session_id": 1, "input_length": prompt, "output_length": output, "hash_ids": first},
            {"delay": 1, "session_id": 1, "input_length": longer, "output_length": 1, "hash_ids": second},
        ),
        name="two",
    )


def test_an_answer_leaves_the_blocks_that_the_next_turn_shares_with_it() -> None:
    """Up to the last token but one: the last is never computed."""
    trace = two_turns([1], [1, 2, 3, 4], prompt=600, output=937, longer=2048)
    blocks = EngineBlocks(trace, reuse_outputs=True)
    assert [list(blocks.left_by(0, number)) for number in (0, 1)] == [[1, 2, 3], [1, 2, 3, 4]]
    shorter = two_turns([1], [1, 2, 3, 4], prompt=600, output=936, longer=2048)
    assert list(EngineBlocks(shorter, reuse_outputs=True).left_by(0, 0)) == [1, 2]
    assert list(EngineBlocks(trace, 256, reuse_outputs=True).left_by(0, 0)) == [2, 3, 4, 5, 6, 7]
    assert list(EngineBlocks(trace).left_by(0, 0)) == [1]


@pytest.mark.parametrize(
    ("second", "longer"), [([7, 2, 3], 1536), ([1, 2], 1400)], ids=["it begins otherwise", "it is too short to hold it"]
)
def test_an_answer_that_the_next_turn_does_not_hold_leaves_nothing(second: list[int], longer: int) -> None:
    """Only what the trace says is reused."""
    trace = two_turns([1], second, prompt=600, output=900, longer=longer)
    assert list(EngineBlocks(trace, reuse_outputs=True).left_by(0, 0)) == [1]
