"""Chained block hashes: the hash of a block names the whole prefix that ends with it.

Every hash is seeded with its parent's: xxh3_64 of tokens and messages, xxh64 of blocks of text, where a seed costs a
third less. Not cryptographic: a collision costs a routing mistake, never an answer.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from struct import Struct

from xxhash import xxh3_64_intdigest, xxh64_intdigest

from kvproxy.base.types import Prompt

#: Block sizes engines use (tokens); any other positive size works too.
BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
#: Bytes in a text block.
TEXT_BLOCK_BYTES = 256

_TOKEN_BYTES = 4
_SLICES = {size: Struct(f"{size}s") for size in (_TOKEN_BYTES * n for n in BLOCK_SIZES)}
_ROW = 256  # blocks of text that are taken at once
#: Raw JSON never contains this byte, so it ends a part without ambiguity.
_END_OF_PART = b"\0"


def root_seed(
    *,
    block_size: int,
    model: str = "",
    lora: str = "",
    cache_salt: str | None = None,
    extra_keys: Iterable[object] = (),
) -> int:
    """Where a chain starts. Different models, LoRAs, salts, extra keys or block sizes share no block."""
    seed = mix_keys(block_size, (model, lora))
    return mix_keys(seed, (*(() if cache_salt is None else (cache_salt,)), *extra_keys))


def mix_keys(seed: int, keys: Iterable[object]) -> int:
    """`seed` with each key folded in; `seed` itself when there are none. Text and its bytes are the same key."""
    for key in keys:
        seed = xxh3_64_intdigest(_key_bytes(key), seed)
    return seed


def _key_bytes(key: object) -> bytes:
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"s" + key
    if isinstance(key, list | tuple):
        return b"l" + mix_keys(len(key), key).to_bytes(8, "little")
    return b"r" + repr(key).encode()


def token_bytes(tokens: array[int]) -> bytes:
    """u32 little-endian bytes of an `array('I')`."""
    return little_endian(tokens).tobytes()


def little_endian(values: array[int]) -> array[int]:
    """Return the array itself, or a swapped copy where the machine is big-endian (and the other way round)."""
    if sys.byteorder == "big":  # pragma: no cover
        values = values[:]
        values.byteswap()
    return values


def token_blocks(tokens: array[int], block_size: int, seed: int) -> array[int]:
    """Hashes of the full blocks of `tokens` (an `array('I')`), as an `array('Q')`; a partial last block has none."""
    slice_bytes = block_size * _TOKEN_BYTES
    slices = _SLICES.get(slice_bytes) or Struct(f"{slice_bytes}s")
    whole = len(tokens) // block_size * block_size
    return _chained(slices.iter_unpack(little_endian(tokens if whole == len(tokens) else tokens[:whole])), seed)


def text_blocks(prompt: Prompt, seed: int) -> array[int]:
    """Hashes of the full 256-byte slices of the prompt's canonical bytes: no tokenizer needed."""
    return text_chain(_END_OF_PART.join((prompt.shape, *prompt.parts, b"")), seed)


def text_chain(data: bytes, seed: int, *, start: int = 0) -> array[int]:
    """Chained hashes of the full 256-byte slices of `data` from byte `start` on."""
    blocks = (len(data) - start) // TEXT_BLOCK_BYTES
    digest = xxh64_intdigest
    first = blocks % _ROW
    hashes = [seed := digest(piece, seed) for piece in _text_slices(first)(data, start)]
    for block in range(first, blocks, _ROW):
        row = _text_slices(_ROW)(data, start + TEXT_BLOCK_BYTES * block)
        hashes += [seed := digest(piece, seed) for piece in row]
    return array("Q", hashes)


@cache
def _text_slices(count: int) -> Callable[[bytes, int], tuple[bytes, ...]]:
    """Take several blocks of text at once, which is faster than one by one; up to `_ROW`."""
    return Struct(f"{TEXT_BLOCK_BYTES}s" * count).unpack_from


def canonical_bytes(prompt: Prompt) -> bytes:
    """One byte string per prompt; a grown chat's begins with what it grew from."""
    return _END_OF_PART.join((prompt.shape, *prompt.parts, b""))


def canonical_tail(parts: Sequence[bytes]) -> bytes:
    """Return what these last parts of a prompt put at the end of its canonical bytes."""
    return _END_OF_PART.join((*parts, b""))


def chain(data: bytes, slice_bytes: int, seed: int, *, start: int = 0) -> array[int]:
    """Chained hashes of the full slices of tokens from byte `start` on."""
    stop = start + (len(data) - start) // slice_bytes * slice_bytes
    slices = _SLICES.get(slice_bytes) or Struct(f"{slice_bytes}s")
    return _chained(slices.iter_unpack(memoryview(data)[start:stop]), seed)


def _chained(slices: Iterable[tuple[bytes]], seed: int) -> array[int]:
    digest = xxh3_64_intdigest
    return array("Q", [seed := digest(piece, seed) for (piece,) in slices])


def message_chain(prompt: Prompt, seed: int) -> Sequence[int]:
    """One key per message prefix, shortest first: the key of `parts[:i+1]` under this shape and seed."""
    seed = xxh3_64_intdigest(prompt.shape, seed)
    return [seed := xxh3_64_intdigest(part, seed) for part in prompt.parts]
