"""Chained hashes from paths, so that tests can think in small tuples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.block_events import BlockRemoved, BlockStored
from kvproxy.cache.indexes.precise import precise_root
from kvproxy.cache.prefix.hashing import token_blocks

A, B, C = EndpointId("a"), EndpointId("b"), EndpointId("c")


def chained(path: Sequence[int], *, seed: int = 7) -> array[int]:
    """One block hash an element; equal beginnings give equal beginnings."""
    return token_blocks(array("I", path), 1, seed)


def stored(
    path: Sequence[int],
    start: int = 0,
    *,
    engine: int = 0,
    size: int = 2,
    medium: str = "GPU",
    parent: int | bytes | None = None,
    group: int | None = None,
    lora: str | None = None,
    extra: tuple[tuple[object, ...] | None, ...] | None = None,
) -> BlockStored:
    """`path[start:]` was stored: one block of `size` equal tokens an element, parent as the path says unless given."""
    names = tuple(engine_hash(path[: i + 1], engine) for i in range(len(path)))
    return BlockStored(
        block_hashes=names[start:],
        parent=parent if parent is not None or not start else names[start - 1],
        token_ids=array("I", [token for token in path[start:] for _ in range(size)]),
        block_tokens=size,
        medium=medium,
        group=group,
        lora_name=lora,
        extra=extra,
    )


def removed(*paths: Sequence[int], engine: int = 0, medium: str = "GPU", group: int | None = None) -> BlockRemoved:
    """Return the event that the last block of each path was removed."""
    return BlockRemoved(tuple(engine_hash(path, engine) for path in paths), medium=medium, group=group)


def engine_hash(path: Sequence[int], engine: int = 0) -> int:
    """Return a block's name at one engine: nothing like ours."""
    return int.from_bytes(sha256(repr((engine, tuple(path))).encode()).digest()[:8], "big")


def prompt_of(path: Sequence[int], *, lora: str = "", cache_salt: str | None = None) -> Callable[[int], array[int]]:
    """Return the prompt those blocks (of two tokens) are of, hashed for any block size."""
    tokens = array("I", [token for token in path for _ in range(2)])
    return lambda size: token_blocks(tokens, size, precise_root(size, lora=lora, cache_salt=cache_salt))
