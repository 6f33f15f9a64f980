"""Stored blocks whose parent is not known yet, kept for a while in case it still comes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.clients.kv_events.events import BlockExtra
from kvproxy.clients.tokens import TokenIds


@dataclass(slots=True)
class ReportedBlocks:
    """Consecutive blocks as an event reported them, waiting for the block before them."""

    parent: int | None  # None: the root, never buffered
    keys: array[int]
    token_ids: TokenIds
    extra: tuple[BlockExtra, ...] | None
    lora: str
    tier: int


class PendingBlocks:
    """Buffered blocks of one source, bounded in number; those that waited longest go first."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks = 0
        #: No BoundedMapping: the lists grow while they are held.
        self._by_parent: OrderedDict[int | None, list[ReportedBlocks]] = OrderedDict()
        self._where: dict[tuple[int, int], ReportedBlocks] = {}  # by tier and key

    def __len__(self) -> int:
        """Blocks buffered."""
        return self._blocks

    def buffer(self, pending: ReportedBlocks) -> int:
        """Keep it; returns the number of blocks that had to go for it (its own, when it alone is too large)."""
        if len(pending.keys) > self._max_blocks:
            return len(pending.keys)
        for key in pending.keys:  # reported again: once is enough
            self.remove(key, pending.tier)
        self._by_parent.setdefault(pending.parent, []).append(pending)
        self._blocks += len(pending.keys)
        self._where.update(dict.fromkeys(((pending.tier, key) for key in pending.keys), pending))
        dropped = 0
        while self._blocks > self._max_blocks:
            dropped += self._release(*self._by_parent.popitem(last=False))
        return dropped

    def take(self, keys: Sequence[int]) -> list[ReportedBlocks]:
        """What waits for one of these blocks; it is buffered no more."""
        found: list[ReportedBlocks] = []
        for key in self._by_parent.keys() & set(keys):
            waiting = self._by_parent.pop(key)
            self._release(key, waiting)
            found += waiting
        return found

    def remove(self, key: int, tier: int) -> bool:
        """The engine removed a buffered block: what follows it in its event cannot be reached any more."""
        pending = self._where.get((tier, key))
        if pending is None:
            return False
        self._cut(pending, pending.keys.index(key))
        return True

    def _cut(self, pending: ReportedBlocks, at: int) -> None:
        size = len(pending.token_ids) // len(pending.keys)
        for key in pending.keys[at:]:
            self._where.pop((pending.tier, key), None)
        self._blocks -= len(pending.keys) - at
        pending.keys = pending.keys[:at]
        pending.token_ids = pending.token_ids[: at * size]
        pending.extra = None if pending.extra is None else pending.extra[:at]
        if not at:
            siblings = self._by_parent[pending.parent]
            siblings[:] = [other for other in siblings if other is not pending]
            if not siblings:
                del self._by_parent[pending.parent]

    def _release(self, parent: int | None, waiting: list[ReportedBlocks]) -> int:
        blocks = 0
        for pending in waiting:
            blocks += len(pending.keys)
            for key in pending.keys:
                self._where.pop((pending.tier, key), None)
        self._blocks -= blocks
        return blocks
