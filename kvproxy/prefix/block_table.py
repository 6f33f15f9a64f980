"""The blocks of one event source, in columns: which engine hash is which of our blocks, on which tiers, under what.

Columns of machine integers rather than an object a block: a million blocks are nothing the garbage collector visits.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

#: Tier 0 is the engine's own memory, the only one whose gaps are tracked.
DEVICE = 0
#: Bits of a block's column of tiers.
MAX_TIERS = 8

ROOT = -1


@dataclass(slots=True)
class Tier:
    """Who holds what on one tier: our hash -> mask of sources."""

    name: str
    masks: dict[int, int] = field(default_factory=dict)


class BlockTable:
    """One source (endpoint, rank, group). A row stays while a tier holds its block or a row hangs below it."""

    def __init__(self, slot: int, block_size: int, tiers: Sequence[Tier], *, max_rows: int, max_ghosts: int) -> None:
        self.slot = slot
        self.block_size = block_size
        self.gaps = 0  # blocks missing on the device between blocks that are there
        self._mask = 1 << slot
        self._tiers = tiers
        self._max_rows = max_rows
        self._max_ghosts = max_ghosts
        self._rows: dict[int, int] = {}
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # removed blocks: children may still come
        self._copies: dict[tuple[int, int], int] = {}  # further engine hashes of one of our blocks, by (tier, block)
        self._free: list[int] = []
        self._keys = array("Q")
        self._blocks = array("Q")
        self._parents = array("i")
        self._on = array("B")  # bit per tier
        self._children = array("I")
        self._device_children = array("I")

    def __len__(self) -> int:
        """Rows, those of missing blocks between present ones included."""
        return len(self._rows)

    def find(self, key: int) -> int | None:
        """Our hash of the block with this engine hash, also for a while after it was removed."""
        row = self._rows.get(key)
        return self._ghosts.get(key) if row is None else self._blocks[row]

    def store(self, keys: Sequence[int], blocks: Sequence[int], parent: int | None, tier: int) -> int:
        """Consecutive blocks are on `tier`, below the block `parent` (its engine hash, which `find` knows; None: root).

        Keys are distinct, and `parent` is none of them. Storing what is there changes nothing. Returns how many fitted
        into the bound.
        """
        above = ROOT if parent is None else self._parent_row(parent)
        known = 0
        if not self._rows.keys().isdisjoint(keys):
            self._forget_renamed(keys, blocks)
            above = ROOT if parent is None else self._parent_row(parent)
            while known < len(keys) and keys[known] in self._rows:
                known += 1
            self._store_each(keys[:known], blocks[:known], above, tier)
            above = self._rows[keys[known - 1]] if known else above
            keys, blocks = keys[known:], blocks[known:]
        if self._rows.keys().isdisjoint(keys) and len(self._rows) + len(keys) <= self._max_rows:
            self._store_new(keys, blocks, above, tier)
            return known + len(keys)
        return known + self._store_each(keys, blocks, above, tier)

    def remove(self, key: int, tier: int) -> bool:
        """The block left `tier`; False when it was not known there."""
        row = self._rows.get(key)
        if row is None or not self._on[row] >> tier & 1:
            return False
        self._hide(row, tier)
        self._prune(row)
        return True

    def sweep(self, rows: int) -> int:
        """Take at most so many rows' bits off the tiers, of a table nobody uses any more; returns rows left."""
        while self._rows and rows > 0:
            rows -= 1
            _, row = self._rows.popitem()
            for tier in _bits(self._on[row]):
                self._clear_bit(tier, self._blocks[row])
        return len(self._rows)

    def _store_new(self, keys: Sequence[int], blocks: Sequence[int], above: int, tier: int) -> None:
        """What `_store_each` does, for blocks that are all new: nearly every event, at a third of the cost."""
        if not keys:
            return
        numbers = self._spare_rows(len(keys))
        self._rows.update(zip(keys, numbers, strict=True))
        columns = self._keys, self._blocks, self._parents, self._on, self._children, self._device_children
        key_of, block_of, parent_of, on, children, device_children = columns
        masks, mask, bit, on_device = self._tiers[tier].masks, self._mask, 1 << tier, int(tier == DEVICE)
        parent = above
        for row, key, block in zip(numbers, keys, blocks, strict=True):
            key_of[row], block_of[row], parent_of[row] = key, block, parent
            on[row], children[row], device_children[row] = bit, 1, on_device
            parent = row
            held = masks.get(block, 0)
            if held & mask:
                self._copies[tier, block] = self._copies.get((tier, block), 0) + 1
            else:
                masks[block] = held | mask if held else mask
        children[parent] = device_children[parent] = 0
        if above >= 0:
            children[above] += 1
            if on_device:
                self._device_child_arrives(above)
        for key in keys if self._ghosts else ():
            self._ghosts.pop(key, None)

    def _spare_rows(self, n: int) -> list[int]:
        """Rows given back, then fresh ones at the end of the columns."""
        given_back = min(n, len(self._free))
        numbers = self._free[len(self._free) - given_back :]
        del self._free[len(self._free) - given_back :]
        fresh, end = n - given_back, len(self._keys)
        for column in (self._keys, self._blocks, self._parents, self._on, self._children, self._device_children):
            column.frombytes(bytes(column.itemsize * fresh))
        numbers.extend(range(end, end + fresh))
        return numbers

    def _store_each(self, keys: Sequence[int], blocks: Sequence[int], above: int, tier: int) -> int:
        bit = 1 << tier
        stored = 0
        for key, block in zip(keys, blocks, strict=True):
            row = self._rows.get(key)
            if row is None:
                if len(self._rows) >= self._max_rows:
                    break
                row = self._row(key, block, above)
            elif self._parents[row] != above:
                self._move(row, above)
            if not self._on[row] & bit:
                self._show(row, tier)
            above = row
            stored += 1
        self._prune(above)  # a parent brought back for nothing
        return stored

    def _row(self, key: int, block: int, parent: int) -> int:
        row = self._free.pop() if self._free else self._spare_rows(1)[0]
        self._keys[row], self._blocks[row], self._parents[row] = key, block, parent
        self._rows[key] = row
        if self._ghosts:
            self._ghosts.pop(key, None)
        if parent >= 0:
            self._children[parent] += 1
        return row

    def _show(self, row: int, tier: int) -> None:
        self._on[row] |= 1 << tier
        block = self._blocks[row]
        masks = self._tiers[tier].masks
        held = masks.get(block)
        if held is None:
            masks[block] = self._mask
        elif held & self._mask:
            self._copies[tier, block] = self._copies.get((tier, block), 0) + 1
        else:
            masks[block] = held | self._mask
        if tier == DEVICE:
            self._device_arrives(row)

    def _hide(self, row: int, tier: int) -> None:
        self._on[row] &= ~(1 << tier)
        block = self._blocks[row]
        copies = self._copies.pop((tier, block), 0) if self._copies else 0
        if copies > 1:
            self._copies[tier, block] = copies - 1
        elif not copies:
            self._clear_bit(tier, block)
        if tier == DEVICE:
            self._device_leaves(row)

    def _clear_bit(self, tier: int, block: int) -> None:
        masks = self._tiers[tier].masks
        left = masks.get(block, 0) & ~self._mask
        if left:
            masks[block] = left
        else:
            masks.pop(block, None)

    def _device_arrives(self, row: int) -> None:
        if self._device_children[row]:
            self.gaps -= 1
        parent = self._parents[row]
        if parent >= 0:
            self._device_child_arrives(parent)

    def _device_child_arrives(self, parent: int) -> None:
        if not self._device_children[parent] and not self._on[parent] & 1:
            self.gaps += 1
        self._device_children[parent] += 1

    def _device_leaves(self, row: int) -> None:
        if self._device_children[row]:
            self.gaps += 1
        parent = self._parents[row]
        if parent >= 0:
            self._device_children[parent] -= 1
            if not self._device_children[parent] and not self._on[parent] & 1:
                self.gaps -= 1

    def _parent_row(self, key: int) -> int:
        row = self._rows.get(key)
        return self._row(key, self._ghosts[key], ROOT) if row is None else row

    def _move(self, row: int, parent: int) -> None:
        """A row whose parent was not known, or was another copy of the same block, hangs below `parent` from now on."""
        old, on_device = self._parents[row], self._on[row] & 1
        if on_device:
            self._device_leaves(row)
        self._parents[row] = parent
        if parent >= 0:
            self._children[parent] += 1
        if on_device:
            self._device_arrives(row)
        if old >= 0:
            self._children[old] -= 1
            self._prune(old)

    def _forget_renamed(self, keys: Sequence[int], blocks: Sequence[int]) -> None:
        """The engine gives an old hash to another block: the old block is gone, what hangs below it stays."""
        for key, block in zip(keys, blocks, strict=True):
            row = self._rows.get(key)
            if row is None or self._blocks[row] == block:
                continue
            for tier in _bits(self._on[row]):
                self._hide(row, tier)
            self._prune(row)
            self._rows.pop(key, None)

    def _prune(self, row: int) -> None:
        """Give the row back unless it is needed, then those above it that were needed only for it."""
        while row >= 0 and not self._on[row] and not self._children[row]:
            key, parent = self._keys[row], self._parents[row]
            if self._rows.get(key) == row:
                del self._rows[key]
            self._free.append(row)
            self._ghosts[key] = self._blocks[row]
            if len(self._ghosts) > self._max_ghosts:
                self._ghosts.popitem(last=False)
            if parent >= 0:
                self._children[parent] -= 1
            row = parent


def _bits(on: int) -> Iterator[int]:
    return (tier for tier in range(MAX_TIERS) if on >> tier & 1)
