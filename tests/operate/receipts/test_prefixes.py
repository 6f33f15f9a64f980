"""Hashes of a prompt's prefixes on a receipt: how much two prompts share can be read from them, and nothing else."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from kvproxy.operate.receipts.receipt import decode_prefixes, encode_prefixes, prefix_depths

KEY = b"k" * 16


def shared(a: array[int], b: array[int]) -> int:
    """Text blocks that two receipts say these prompts share."""
    first = dict(decode_prefixes(len(a), encode_prefixes(a, key=KEY)))
    second = decode_prefixes(len(b), encode_prefixes(b, key=KEY))
    return max((depth for depth, name in second if first.get(depth) == name), default=0)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [(0, "AAAAAAA="), (3, ""), (3, "not base64!"), (2, encode_prefixes(array("Q", range(9)), key=KEY)), (1, "é")],
    ids=["no blocks", "empty", "no base64", "of a longer prompt", "not ASCII"],
)
def test_an_invalid_list_of_prefixes_is_none(blocks: int, text: str) -> None:
    """A receipt that was cut or written by another hand tells nothing, and raises nothing."""
    assert decode_prefixes(blocks, text) == []


def test_a_prompt_has_the_same_names_in_every_process() -> None:
    """Workers share the key, and what one of them recorded is compared with what another one did."""
    assert encode_prefixes(array("Q", range(1, 4)), key=KEY) == "Yq4eIPrakZMJ62Ywaua+"


def test_another_key_has_other_names() -> None:
    """Hashes of one run cannot be recognised with the key of another."""
    prompt = array("Q", range(40))
    first, second = (decode_prefixes(40, encode_prefixes(prompt, key=key)) for key in (KEY, b"other" * 4))
    assert not {name for _, name in first} & {name for _, name in second}


def test_depths_are_few_and_end_with_the_prompt() -> None:
    """They grow with the logarithm of the length."""
    assert prefix_depths(0) == ()
    assert prefix_depths(12) == tuple(range(1, 13))
    for blocks in (100, 1000, 100_000, 1_000_000):
        depths = prefix_depths(blocks)
        assert depths[-1] == blocks
        assert list(depths) == sorted(set(depths))
        assert len(depths) <= 220


def test_a_shared_prefix_is_missed_by_a_third_at_most() -> None:
    """Of it, or of what follows it in either prompt, whichever is less: a session's next turn finds nearly all."""
    rng = Random(1)
    for _ in range(400):
        common = rng.randrange(1, 3000)
        a, b = (common + rng.randrange(0, 2000) for _ in range(2))
        base = [rng.getrandbits(64) for _ in range(common)]
        prompts = [array("Q", [*base, *(rng.getrandbits(64) for _ in range(n - common))]) for n in (a, b)]
        found = shared(*prompts)
        assert common - found <= max(1, min(common, max(a, b) - common)) / 3 + 1
        assert found <= common


def test_a_grown_prompt_shares_its_whole_beginning() -> None:
    """Where the new part is small, to the block."""
    prompt = array("Q", Random(1).sample(range(1 << 60), 1003))
    assert shared(prompt[:999], prompt) == 999
