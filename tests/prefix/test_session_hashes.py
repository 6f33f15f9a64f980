from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvproxy.prefix.hashing import message_chain, text_blocks, token_blocks
from kvproxy.prefix.session_hashes import SessionHashes
from kvproxy.types import Prompt

TOKENS = array("I", range(1000))


def test_a_next_turn_hashes_like_a_whole_prompt() -> None:
    """Continuing a known session gives what hashing everything gives."""
    memo = SessionHashes()
    first = memo.token_blocks([11], TOKENS[:100], 16, 5)
    second = memo.token_blocks([11, 12, 13], TOKENS[:400], 16, 5)
    assert first == token_blocks(TOKENS[:100], 16, 5)
    assert second == token_blocks(TOKENS[:400], 16, 5)
    assert len(memo) == 2


def test_a_changed_history_is_noticed() -> None:
    """The same session key over other tokens does not bring back the old blocks."""
    memo = SessionHashes()
    memo.token_blocks([11], TOKENS[:100], 16, 5)
    other = array("I", [9, *TOKENS[1:200]])
    assert memo.token_blocks([11, 12], other, 16, 5) == token_blocks(other, 16, 5)


def test_a_shorter_prompt_under_a_known_key_is_cut() -> None:
    """The known blocks may be more than this prompt has."""
    memo = SessionHashes()
    memo.token_blocks([11], TOKENS[:100], 16, 5)
    assert memo.token_blocks([11, 12], TOKENS[:96], 16, 5) == token_blocks(TOKENS[:96], 16, 5)
    assert memo.token_blocks([11, 12], TOKENS[:50], 16, 5) == token_blocks(TOKENS[:50], 16, 5)


def test_block_sizes_and_seeds_do_not_mix() -> None:
    """One session may be hashed in several ways at once."""
    memo = SessionHashes()
    for size in (16, 32):
        for seed in (1, 2):
            assert memo.token_blocks([11], TOKENS, size, seed) == token_blocks(TOKENS, size, seed)
    assert len(memo) == 4


def test_without_session_keys_nothing_is_kept() -> None:
    """A prompt without parts has no session."""
    memo = SessionHashes()
    assert memo.token_blocks([], TOKENS, 16, 1) == token_blocks(TOKENS, 16, 1)
    assert len(memo) == 0


def test_the_memo_is_bounded_in_bytes() -> None:
    """Least recently used sessions go; one that would not fit at all is not kept."""
    memo = SessionHashes(max_bytes=2000)
    for session in range(50):
        memo.token_blocks([session], TOKENS[:320], 16, 1)
    assert 0 < memo.held_bytes <= 2000
    kept = len(memo)
    memo.token_blocks([99], array("I", range(16 * 400)), 16, 1)
    assert len(memo) == kept


@given(st.lists(st.binary(min_size=0, max_size=400), min_size=1, max_size=6))
def test_text_of_a_growing_chat(parts: list[bytes]) -> None:
    """Turn by turn, the memo's text blocks are those of the whole prompt."""
    memo = SessionHashes()
    for turn in range(1, len(parts) + 1):
        prompt = Prompt(b"shape", tuple(parts[:turn]))
        assert memo.text_blocks(message_chain(prompt, 3), prompt, 8) == text_blocks(prompt, 8)
