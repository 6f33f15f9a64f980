"""Tokens with their block hashes: what hashing them from the start gives."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.cache.prefix.hashing import token_blocks
from kvproxy.cache.prefix.token_memory import MAX_WAYS, HashedTokens

TOKENS = array("I", range(1000))


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("count", [0, 15, 16, 640, 999, 1000])
def test_leading_blocks_are_those_of_the_leading_tokens(size: int, count: int) -> None:
    """A chain's beginning does not depend on what follows."""
    hashed = HashedTokens(TOKENS)
    assert hashed.leading_blocks(size, 5, count) == token_blocks(TOKENS[:count], size, 5)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 40), st.sampled_from([16, 32]))
def test_a_grown_prompt_continues(before: int, more: int, given_up: int, size: int) -> None:
    """Its last tokens may have been others."""
    earlier = HashedTokens(TOKENS[:before])
    earlier.blocks(size, 3)
    kept = max(0, before - given_up)
    grown = TOKENS[:kept] + array("I", range(5000, 5000 + more))
    hashed = HashedTokens(grown, grown_from=earlier, given_up=given_up)
    assert hashed.blocks(size, 3) == token_blocks(grown, size, 3)


def test_a_changed_history_is_noticed() -> None:
    """Other tokens under the same messages do not inherit the old blocks."""
    earlier = HashedTokens(TOKENS[:320])
    earlier.blocks(16, 3)
    other = array("I", [9, *TOKENS[1:400]])
    assert HashedTokens(other, grown_from=earlier).blocks(16, 3) == token_blocks(other, 16, 3)


def test_ways_of_hashing_are_bounded_and_do_not_mix() -> None:
    """Block sizes and seeds."""
    hashed = HashedTokens(TOKENS)
    for seed in range(3 * MAX_WAYS):
        assert hashed.blocks(16, seed) == token_blocks(TOKENS, 16, seed)
    assert len(hashed._blocks) == MAX_WAYS
    assert hashed.blocks(32, 0) == token_blocks(TOKENS, 32, 0)


def test_the_work_is_done_once() -> None:
    """The next turn finds it done."""
    earlier = HashedTokens(TOKENS[:320])
    blocks = earlier.blocks(16, 3)
    assert earlier.blocks(16, 3) is blocks
    grown = HashedTokens(TOKENS, grown_from=earlier)
    assert list(grown._blocks) == [(16, 3)]


def test_the_work_is_done_once_with_another_generation_prompt() -> None:
    """Tokens that are given up may differ without the rest being hashed again."""
    earlier = HashedTokens(TOKENS[:312] + array("I", [7] * 8))
    earlier.blocks(16, 3)
    grown = HashedTokens(TOKENS, grown_from=earlier, given_up=8)
    assert list(grown._blocks) == [(16, 3)]
