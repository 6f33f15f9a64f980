"""Stored blocks whose parent is not known yet, kept for a while in case it still comes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.clients.kv_events.events import BlockExtra
from kvproxy.clients.tokens import TokenIds


@dataclass(slots=True)
class PendingBlock:
    """A run of blocks waiting for the block before it."""

    parent: int | None  # None: the root, never parked
    keys: array[int]
    token_ids: TokenIds
    extra: tuple[BlockExtra, ...] | None
    lora: str
    tier: int


class PendingBlocks:
    """Parked runs of one source, bounded in blocks; the longest parked go first."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks = 0
        self._by_parent: OrderedDict[int | None, list[PendingBlock]] = OrderedDict()
        self._where: dict[tuple[int, int], PendingBlock] = {}  # by tier and key

    def __len__(self) -> int:
        """Blocks parked."""
        return self._blocks

    def park(self, orphan: PendingBlock) -> int:
        """Keep it; returns the number of blocks that had to go for it (its own, when it alone is too large)."""
        if len(orphan.keys) > self._max_blocks:
            return len(orphan.keys)
        for key in orphan.keys:  # told again: once is enough
            self.remove(key, orphan.tier)
        self._by_parent.setdefault(orphan.parent, []).append(orphan)
        self._blocks += len(orphan.keys)
        self._where.update(dict.fromkeys(((orphan.tier, key) for key in orphan.keys), orphan))
        dropped = 0
        while self._blocks > self._max_blocks:
            dropped += self._release(*self._by_parent.popitem(last=False))
        return dropped

    def claim(self, keys: Sequence[int]) -> list[PendingBlock]:
        """The runs that wait for one of these blocks; they are parked no more."""
        found: list[PendingBlock] = []
        for key in self._by_parent.keys() & set(keys):
            waiting = self._by_parent.pop(key)
            self._release(key, waiting)
            found += waiting
        return found

    def remove(self, key: int, tier: int) -> bool:
        """The engine removed a parked block: what follows it in its run cannot be reached any more."""
        orphan = self._where.get((tier, key))
        if orphan is None:
            return False
        self._cut(orphan, orphan.keys.index(key))
        return True

    def _cut(self, orphan: PendingBlock, at: int) -> None:
        size = len(orphan.token_ids) // len(orphan.keys)
        for key in orphan.keys[at:]:
            self._where.pop((orphan.tier, key), None)
        self._blocks -= len(orphan.keys) - at
        orphan.keys = orphan.keys[:at]
        orphan.token_ids = orphan.token_ids[: at * size]
        orphan.extra = None if orphan.extra is None else orphan.extra[:at]
        if not at:
            siblings = self._by_parent[orphan.parent]
            siblings[:] = [other for other in siblings if other is not orphan]
            if not siblings:
                del self._by_parent[orphan.parent]

    def _release(self, parent: int | None, orphans: list[PendingBlock]) -> int:
        blocks = 0
        for orphan in orphans:
            blocks += len(orphan.keys)
            for key in orphan.keys:
                self._where.pop((orphan.tier, key), None)
        self._blocks -= blocks
        return blocks
