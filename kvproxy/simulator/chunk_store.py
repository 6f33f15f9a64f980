"""Chunks of KV that one instance keeps in one location: least recently used ones go, pinned ones stay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvproxy.simulator.block_hashing import hash_blocks
from kvproxy.types import Clock

CHUNK_TOKENS = 256


def hash_chunks(tokens: Sequence[int]) -> list[int]:
    """Chained hashes of the full 256-token chunks; model, LoRA and salt are not part of them."""
    return hash_blocks(tokens, CHUNK_TOKENS)


class ChunkStore:
    """Bounded; a pin is a lease that lapses `pin_s` after it was taken."""

    def __init__(self, capacity_chunks: int, *, clock: Clock, pin_s: float = 300.0) -> None:
        self.capacity_chunks = capacity_chunks
        self._clock = clock
        self._pin_s = pin_s
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self._pinned_until: dict[int, float] = {}
        self.compressed: set[int] = set()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def admit(self, chunks: Sequence[int]) -> list[int]:
        """Stores chunks as most recent; returns what had to go. Pinned ones never go, so a full store may refuse."""
        evicted = []
        for chunk in chunks:
            if chunk in self._chunks:
                self._chunks.move_to_end(chunk)
                continue
            if len(self._chunks) >= self.capacity_chunks:
                victim = next((held for held in self._chunks if not self.is_pinned(held)), None)
                if victim is None:
                    break
                self._drop(victim)
                evicted.append(victim)
            self._chunks[chunk] = None
        return evicted

    def held_prefix(self, chunks: Sequence[int]) -> list[int]:
        """The leading chunks that are held."""
        held = []
        for chunk in chunks:
            if chunk not in self._chunks:
                break
            held.append(chunk)
        return held

    def pin(self, chunks: Sequence[int]) -> int:
        """Leases the held prefix; the number of chunks."""
        held = self.held_prefix(chunks)
        until = self._clock() + self._pin_s
        for chunk in held:
            self._pinned_until[chunk] = until
        return len(held)

    def is_pinned(self, chunk: int) -> bool:
        """Whether a lease is running."""
        return self._pinned_until.get(chunk, float("-inf")) > self._clock()

    @property
    def pins(self) -> int:
        """Chunks under a running lease."""
        return sum(1 for chunk in self._chunks if self.is_pinned(chunk))

    def remove(self, chunks: Sequence[int]) -> int:
        """Drops the unpinned of these; the number dropped."""
        gone = [chunk for chunk in chunks if chunk in self._chunks and not self.is_pinned(chunk)]
        for chunk in gone:
            self._drop(chunk)
        return len(gone)

    def clear(self) -> int:
        """Drops everything unpinned; the number dropped."""
        return self.remove(list(self._chunks))

    def _drop(self, chunk: int) -> None:
        del self._chunks[chunk]
        self._pinned_until.pop(chunk, None)
        self.compressed.discard(chunk)
