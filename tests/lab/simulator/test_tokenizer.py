"""The built-in tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.lab.simulator.tokenizer import Tokenizer

TOKENIZER = Tokenizer()


@given(st.binary())
def test_decoding_gives_the_text_back(raw: bytes) -> None:
    """Reversible for every text, whatever its script."""
    text = raw.decode("utf-8", "ignore")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.sampled_from(TOKENIZER.slice_output_ids), max_size=40))
def test_generated_text_reads_back_as_the_same_ids(said: list[int]) -> None:
    """A next turn that quotes the answer continues the cached blocks."""
    text = "<|im_start|>assistant\n" + TOKENIZER.decode(said) + "<|im_end|>\n"
    assert TOKENIZER.encode(text)[3:-2] == said


def test_a_prefix_keeps_its_ids_when_words_follow() -> None:
    """Longer prompts share the leading blocks of shorter ones."""
    short = TOKENIZER.encode("The sea is cold.\n")
    assert TOKENIZER.encode("The sea is cold.\nAnd the land is warm.")[: len(short)] == short


def test_special_tokens_are_one_id() -> None:
    """Chat templates write them out in text."""
    assert len(TOKENIZER.encode("<|im_start|>")) == 1
    assert max(TOKENIZER.encode("<|im_end|>")) == len(TOKENIZER) - 1


def test_visible_spelling_is_byte_level() -> None:
    """As Qwen and GPT-2 spell their vocabulary."""
    assert TOKENIZER.token_strings(TOKENIZER.encode("Hello world\n")) == ["Hello", "Ġworld", "Ċ"]
    assert TOKENIZER.token_strings(TOKENIZER.encode("é")) == ["Ã", "©"]


def test_words_are_short_and_bytes_are_the_last_resort() -> None:
    """A common word is one token; unknown ones fall apart into known pieces."""
    assert len(TOKENIZER.encode(" before")) == 1
    assert 1 < len(TOKENIZER.encode(" zyxwv")) <= 6


@pytest.mark.parametrize("token", [-1, 10**6])
def test_unknown_ids_are_an_error(token: int) -> None:
    """Out of range is no text."""
    with pytest.raises(ValueError, match="out of range"):
        TOKENIZER.decode([token])


def test_another_tokenizer_has_other_ids() -> None:
    """Without word pieces rare words take more tokens, and the same words have other ids; both read back."""
    other = Tokenizer(word_pieces=False)
    text = "The interaction of strangers\n"
    assert len(other.encode(text)) > len(TOKENIZER.encode(text))
    assert other.encode(" strong") != TOKENIZER.encode(" strong")
    assert other.decode(other.encode(text)) == text
