from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh64_intdigest

from kvproxy.base.types import Prompt
from kvproxy.cache.prefix.hashing import (
    BLOCK_SIZES,
    TEXT_BLOCK_BYTES,
    canonical_bytes,
    message_chain,
    mix_keys,
    root_seed,
    text_blocks,
    text_chain,
    token_blocks,
)

TOKENS = array("I", range(2048))


@pytest.mark.parametrize("size", [*BLOCK_SIZES, 1, 24])
def test_block_hashes_chain_over_little_endian_tokens(size: int) -> None:
    """Each hash is xxh3_64 of the block's u32 bytes, seeded with the one before; a partial block has none."""
    tokens = TOKENS[: 3 * size + size // 2]
    parent, expected = 5, []
    for start in range(0, 3 * size, size):
        parent = xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in tokens[start : start + size]), parent)
        expected.append(parent)
    assert token_blocks(tokens, size, 5).tolist() == expected


def test_prompts_shorter_than_a_block_have_no_blocks() -> None:
    """Engines cache whole blocks only."""
    assert not token_blocks(array("I", [1, 2, 3]), 16, 0)
    assert not text_blocks(Prompt(b"", (b'"short"',)), 0)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=64), st.lists(st.integers(0, 2**32 - 1), max_size=64))
def test_equal_hashes_are_exactly_the_common_blocks(first: list[int], second: list[int]) -> None:
    """A block's hash names everything before it."""
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    a, b = token_blocks(array("I", first), 4, 1), token_blocks(array("I", second), 4, 1)
    assert [x == y for x, y in zip(a, b, strict=False)] == [i < common // 4 for i in range(min(len(a), len(b)))]


def test_whatever_shapes_the_cache_separates_chains() -> None:
    """Model, LoRA, salt, extra keys and block size each start a chain of their own."""
    roots = [
        root_seed(block_size=16, model="m"),
        root_seed(block_size=32, model="m"),
        root_seed(block_size=16, model="n"),
        root_seed(block_size=16, lora="m"),
        root_seed(block_size=16, model="m", lora="m"),
        root_seed(block_size=16, model="m", cache_salt=""),
        root_seed(block_size=16, model="m", cache_salt="s"),
        root_seed(block_size=16, model="m", cache_salt="s", extra_keys=["s"]),
        root_seed(block_size=16, model="m", extra_keys=[("s", 1)]),
        root_seed(block_size=16, model="m", extra_keys=["s", 1]),
        root_seed(block_size=16, model="m", extra_keys=[1, "s"]),
        root_seed(block_size=16, model="m", extra_keys=[1.0, "s"]),
        root_seed(block_size=16, model="ms"),
    ]
    assert len(set(roots)) == len(roots)


def test_no_keys_leave_the_seed_alone() -> None:
    """A block without extra keys chains from its parent directly; text and bytes are one key."""
    assert mix_keys(9, ()) == 9
    assert mix_keys(9, ["x"]) == mix_keys(9, [b"x"]) != 9


@given(st.binary(max_size=40 * TEXT_BLOCK_BYTES), st.integers(0, 3000))
def test_text_is_hashed_in_rows_as_block_by_block(data: bytes, start: int) -> None:
    """Each hash is xxh64 of the slice, seeded with the one before, from wherever it begins."""
    parent, expected = 5, []
    for at in range(start := min(start, len(data)), len(data) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES):
        parent = xxh64_intdigest(data[at : at + TEXT_BLOCK_BYTES], parent)
        expected.append(parent)
    assert text_chain(data, 5, start=start).tolist() == expected


@pytest.mark.parametrize("blocks", [0, 1, 255, 256, 257, 511, 512, 700])
def test_text_of_any_length_is_chained_block_by_block(blocks: int) -> None:
    """However many of its blocks are taken at once."""
    data = random.Random(blocks).randbytes(TEXT_BLOCK_BYTES * blocks + 100)
    parent, places = 5, range(50, 50 + TEXT_BLOCK_BYTES * blocks, TEXT_BLOCK_BYTES)
    expected = [parent := xxh64_intdigest(data[at : at + TEXT_BLOCK_BYTES], parent) for at in places]
    assert text_chain(data, 5, start=50).tolist() == expected


def test_a_grown_chat_keeps_its_text_blocks() -> None:
    """The canonical bytes of messages[:k] begin those of messages[:k+1]."""
    parts = tuple(b'{"role":"user","content":"%d %s"}' % (i, b"x" * 300) for i in range(4))
    short, long = Prompt(b"tools[]", parts[:3]), Prompt(b"tools[]", parts)
    assert canonical_bytes(long).startswith(canonical_bytes(short))
    known = text_blocks(short, 3)
    assert text_blocks(long, 3)[: len(known)] == known


def test_parts_and_shape_do_not_run_into_each_other() -> None:
    """Where one part ends and the next begins is part of the text."""
    variants = [
        Prompt(b"", (b"ab", b"c")),
        Prompt(b"", (b"a", b"bc")),
        Prompt(b"a", (b"b", b"c")),
        Prompt(b"", (b"abc",)),
    ]
    assert len({canonical_bytes(each) for each in variants}) == len(variants)
    assert len({message_chain(each, 0)[-1] for each in variants}) == len(variants)


def test_message_chain_has_a_key_for_every_prefix() -> None:
    """The keys of a shorter chat are the first keys of the longer one."""
    parts = (b"1", b"2", b"3")
    assert list(message_chain(Prompt(b"s", parts), 4))[:2] == list(message_chain(Prompt(b"s", parts[:2]), 4))
    assert message_chain(Prompt(b"s", ()), 4) == []
