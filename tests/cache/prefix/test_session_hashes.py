"""Text blocks turn by turn: what hashing everything gives, bounded."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import Prompt, RequestKind
from kvproxy.cache.prefix import session_hashes
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES, message_chain, text_blocks
from kvproxy.cache.prefix.session_hashes import PromptText, SessionHashes

SYSTEM, LONG = b"s" * 600, b"l" * 5000


def turns(*parts: bytes, shape: bytes = b"shape") -> Prompt:
    return Prompt(shape, parts)


def blocks(memo: SessionHashes, prompt: Prompt, seed: int) -> array[int]:
    keys = message_chain(prompt, seed)
    return memo.blocks_of(PromptText.of_prompt(prompt), seed, keys) if keys else text_blocks(prompt, seed)


@given(st.lists(st.binary(min_size=0, max_size=700), min_size=1, max_size=6), st.binary(max_size=600))
def test_a_growing_chat_hashes_like_whole_prompts(parts: list[bytes], shape: bytes) -> None:
    """Whatever was kept of earlier turns, and wherever these ended within a block."""
    memo = SessionHashes()
    for turn in range(1, len(parts) + 1):
        prompt = Prompt(shape, tuple(parts[:turn]))
        assert blocks(memo, prompt, 8) == text_blocks(prompt, 8)
        assert blocks(memo, prompt, 8) == text_blocks(prompt, 8)  # asked again


@given(st.data())
def test_texts_that_begin_alike_hash_like_whole_prompts(data: st.DataObject) -> None:
    """Where they part within a message, wherever that is."""
    memo = SessionHashes()
    text = b"".join(b"%08d" % number for number in range(5000))
    for _ in range(3):
        at = data.draw(st.integers(0, len(text)))
        prompt = turns(text[:at] + data.draw(st.binary(max_size=9)) + text[at:])
        assert blocks(memo, prompt, 8) == text_blocks(prompt, 8)


def test_a_text_that_begins_alike_is_hashed_from_where_they_part() -> None:
    """A long document with another question behind it in the same message: what came before is looked up by piece."""
    memo = SessionHashes()
    document = b"d" * 3 * session_hashes._PIECE_BYTES
    blocks(memo, turns(document + b"first question"), 8)
    for kept in memo._pieces.values():
        kept[0] ^= 1
    asked = blocks(memo, turns(document + b"second question"), 8)
    whole = text_blocks(turns(document + b"second question"), 8)
    assert [at for at, pair in enumerate(zip(asked, whole, strict=True)) if pair[0] != pair[1]] == [0, 64, 128]


def test_pieces_of_text_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first, and what is held counts."""
    monkeypatch.setattr(session_hashes, "_MAX_PIECES", 4)
    memo = SessionHashes()
    for letter in (b"a", b"b", b"c"):
        prompt = turns(letter * 3 * session_hashes._PIECE_BYTES)
        assert blocks(memo, prompt, 8) == text_blocks(prompt, 8)
    assert len(memo._pieces) == 4
    assert memo.held_bytes >= 4 * session_hashes._PIECE_ENTRY_BYTES


def test_only_the_new_messages_are_hashed() -> None:
    """Text that a known turn covers is not examined again: it may be anything (its key cannot)."""
    memo = SessionHashes()
    blocks(memo, turns(SYSTEM, LONG), 8)
    kept = next(iter(memo._known.values()))
    kept[0] ^= 1
    grown = turns(SYSTEM, LONG, b"next" * 100)
    assert blocks(memo, grown, 8)[1:] == text_blocks(grown, 8)[1:]
    assert blocks(memo, grown, 8)[0] == kept[0]


def test_a_branch_of_a_chat_has_its_own_blocks() -> None:
    """Two answers to one turn."""
    memo = SessionHashes()
    blocks(memo, turns(SYSTEM, LONG), 8)
    for answer in (b"a" * 900, b"b" * 900):
        branch = turns(SYSTEM, LONG, answer)
        assert blocks(memo, branch, 8) == text_blocks(branch, 8)


def test_seeds_and_shapes_do_not_mix() -> None:
    """Other models, salts and tools are other prompts."""
    memo = SessionHashes()
    for seed in (1, 2):
        for shape in (b"", b"tools"):
            prompt = turns(LONG, shape=shape)
            assert blocks(memo, prompt, seed) == text_blocks(prompt, seed)
    assert len(memo) == 4


def test_prompts_without_blocks_are_not_kept() -> None:
    """Nor a prompt without messages."""
    memo = SessionHashes()
    assert blocks(memo, turns(), 1) == text_blocks(turns(), 1)
    assert not blocks(memo, turns(b"hi"), 1)
    assert (len(memo), memo.held_bytes) == (0, 0)


def test_the_memo_is_bounded_in_bytes() -> None:
    """The longest unused goes; what would not fit at all is not kept."""
    size = session_hashes._ENTRY_BYTES + 8 * (TEXT_BLOCK_BYTES * 4 // TEXT_BLOCK_BYTES)
    memo = SessionHashes(max_bytes=3 * size)
    prompts = [turns(b"%04d" % number + b"x" * (4 * TEXT_BLOCK_BYTES)) for number in range(4)]
    for prompt in prompts[:3]:
        blocks(memo, prompt, 1)
    assert (len(memo), memo.held_bytes) == (3, 3 * size)
    blocks(memo, prompts[0], 1)
    oldest = set(memo._known) - set(list(memo._known)[1:])
    blocks(memo, prompts[3], 1)
    assert (len(memo), memo.held_bytes) == (3, 3 * size)
    assert not oldest & set(memo._known)
    blocks(memo, turns(b"y" * (TEXT_BLOCK_BYTES * 1000)), 1)
    assert len(memo) == 3


def test_a_chat_of_many_marks_is_not_kept_once_for_each() -> None:
    """Each would be a copy of all the keys before it: 200 ms for 4096 messages of 90 bytes."""
    marked = b'{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}]}'
    memo = SessionHashes()
    memo.identified(RequestKind.MESSAGES, turns(*[marked] * 4000), 1)
    assert memo.held_bytes < 8 * 8 * 4000
