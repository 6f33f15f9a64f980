"""Chained hashes from paths, so that tests can think in small tuples."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvproxy.prefix.hashing import token_blocks
from kvproxy.types import EndpointId

A, B, C = EndpointId("a"), EndpointId("b"), EndpointId("c")


def chained(path: Sequence[int], *, seed: int = 7) -> array[int]:
    """One block hash an element; equal beginnings give equal beginnings."""
    return token_blocks(array("I", path), 1, seed)
