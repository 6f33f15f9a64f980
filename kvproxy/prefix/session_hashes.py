"""Hashes only the new tail of a session whose earlier prompt was hashed before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cachetools import LRUCache
from xxhash import xxh3_64_intdigest

from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES, canonical_bytes, chain, mix_keys, token_bytes
from kvproxy.types import Prompt

_ENTRY_BYTES = 300  # an entry's objects besides the hashes themselves


@dataclass(frozen=True, slots=True)
class _Known:
    covered_bytes: int  # whole slices only
    digest: int  # of the covered bytes: a changed history is noticed, not believed
    hashes: array[int]


def _size(known: _Known) -> int:
    return _ENTRY_BYTES + 8 * len(known.hashes)


class SessionHashes:
    """Block hashes by message prefix, bounded by bytes (least recently used first out). Holds no prompt text."""

    def __init__(self, *, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._known: LRUCache[int, _Known] = LRUCache(max_bytes, getsizeof=_size)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def held_bytes(self) -> int:
        """Bytes held, objects included."""
        return int(self._known.currsize)

    def token_blocks(self, prefix_keys: Sequence[int], tokens: array[int], block_size: int, seed: int) -> array[int]:
        """As `hashing.token_blocks`; `prefix_keys` is the prompt's `message_chain`. The result is not to be changed."""
        return self._blocks(prefix_keys, token_bytes(tokens), 4 * block_size, seed)

    def text_blocks(self, prefix_keys: Sequence[int], prompt: Prompt, seed: int) -> array[int]:
        """As `hashing.text_blocks`. The result is not to be changed."""
        return self._blocks(prefix_keys, canonical_bytes(prompt), TEXT_BLOCK_BYTES, seed)

    def _blocks(self, prefix_keys: Sequence[int], data: bytes, slice_bytes: int, seed: int) -> array[int]:
        if not prefix_keys:
            return chain(data, slice_bytes, seed)
        space = mix_keys(seed, (slice_bytes,))
        covered = len(data) // slice_bytes * slice_bytes
        known = self._longest(prefix_keys, data, space)
        if known is None:
            hashes = chain(data, slice_bytes, seed)
        elif known.covered_bytes >= covered:
            return known.hashes if known.covered_bytes == covered else known.hashes[: covered // slice_bytes]
        else:
            parent = known.hashes[-1] if known.hashes else seed
            hashes = known.hashes + chain(data, slice_bytes, parent, start=known.covered_bytes)
        entry = _Known(covered, xxh3_64_intdigest(memoryview(data)[:covered]), hashes)
        if _size(entry) <= self._known.maxsize:
            self._known[prefix_keys[-1] ^ space] = entry
        return hashes

    def _longest(self, prefix_keys: Sequence[int], data: bytes, space: int) -> _Known | None:
        view = memoryview(data)
        for key in reversed(prefix_keys):
            try:
                known = self._known[key ^ space]
            except KeyError:  # cheaper than .get, which takes the slow path of the base class
                continue
            if known.covered_bytes <= len(data) and xxh3_64_intdigest(view[: known.covered_bytes]) == known.digest:
                return known
        return None
