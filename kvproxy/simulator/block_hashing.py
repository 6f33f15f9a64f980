"""Chained hashes of token blocks, as a simulated engine names them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash


def hash_blocks(
    token_ids: Sequence[int], block_size: int, *, lora: str | None = None, salt: str | None = None
) -> list[int]:
    """One 64-bit hash a full block, each over its tokens and the whole prefix; LoRA and salt are part of the chain."""
    raw = memoryview(array("q", token_ids).tobytes())
    width = 8 * block_size
    extra = f"{'' if lora is None else 'l' + lora}\0{'' if salt is None else 's' + salt}"
    parent = xxhash.xxh3_64_intdigest(extra.encode())
    hashes = []
    for start in range(0, len(raw) - width + 1, width):
        parent = xxhash.xxh3_64_intdigest(raw[start : start + width], seed=parent)
        hashes.append(parent)
    return hashes
