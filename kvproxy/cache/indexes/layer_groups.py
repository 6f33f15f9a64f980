"""States of a hybrid model's other layers: the ends of prefixes at which an engine keeps them.

Beside full attention, whose blocks make a prefix, a hybrid model has groups of layers that need little of it: a
state-space layer the one state at the end of the reused prefix, a sliding window the last blocks before that end.
Engines keep these at few places and announce them as blocks of groups of their own, under the same hashes as the blocks
of full attention that end there."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm

from kvproxy.cache.indexes.block_events import BlockStored

_STATE = "mamba"
_WINDOWS = frozenset({"sliding_window", "sliding_window_mla"})

#: Blocks searched for one prompt and group: half a millisecond. Beyond, no block is reusable.
MAX_LOOKS = 4096
#: Groups of one rank; a model has a few.
MAX_GROUPS = 16
#: Number of sets for the keys, so that none is large enough to hold the event loop when it grows or goes.
_SHARDS = 257


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Needs of one group, with blocks of `block_tokens`: `blocks` of them before a prefix's end."""

    block_tokens: int
    blocks: int

    @classmethod
    def of(cls, event: BlockStored) -> LayerKind | None:
        """None: of a kind that reports nothing of what is reusable, or not enough."""
        if event.spec_kind == _STATE:
            return cls(event.block_tokens, 1)
        if event.spec_kind in _WINDOWS and event.window:
            return cls(event.block_tokens, max(1, -(-(event.window - 1) // event.block_tokens)))
        return None


class LayerGroup:
    """The blocks of one group, by key."""

    def __init__(self, kind: LayerKind) -> None:
        self.kind = kind
        self._kept: list[set[int]] = [set() for _ in range(_SHARDS)]
        self._count = 0

    def store(self, keys: Iterable[int], most: int) -> None:
        """Keep these, `most` in all."""
        for key in keys:
            shard = self._kept[key % _SHARDS]
            if key not in shard and self._count < most:
                shard.add(key)
                self._count += 1

    def remove(self, key: int) -> bool:
        """Remove a block; False when it was not known."""
        shard = self._kept[key % _SHARDS]
        if key not in shard:
            return False
        shard.remove(key)
        self._count -= 1
        return True

    def last_end(self, keys: array[int], end: int, step: int, size: int) -> int:
        """Return the last end at or before `end`, a multiple of `step` blocks, at which this group has what it needs;
        0: none. Its own blocks are as long as `size` of these. (Everything in one loop: calls would take most of the
        time.)"""
        kept = self._kept
        need = self.kind.blocks * size
        looks = MAX_LOOKS
        if need <= size:
            for at in range(end, max(0, end - looks * step), -step):
                key = keys[at - 1]
                if key in kept[key % _SHARDS]:
                    return at
            return 0
        while end > 0:
            for at in range(end, max(0, end - need), -size):
                looks -= 1
                key = keys[at - 1]
                if key not in kept[key % _SHARDS]:
                    end = (at - 1) // step * step
                    break
                if not looks:
                    return 0
            else:
                return end
        return 0

    def sweep_rows(self, rows: int) -> int:
        """Drop about this many blocks of a retired group. Returns the rest of the budget: 0 or less until nothing is
        left."""
        while self._kept and rows > 0:
            rows -= 1 + len(self._kept.pop())
        return rows


class LayerGroups:
    """All such groups of one rank."""

    def __init__(self) -> None:
        self._groups: dict[int, LayerGroup] = {}

    def __iter__(self) -> Iterator[LayerGroup]:
        return iter(self._groups.values())

    def follow_event(self, number: int, kind: LayerKind) -> tuple[LayerGroup | None, LayerGroup | None]:
        """Return the group of this number, made on first sight (None: there are too many), and one of another kind that
        had it, to be dropped."""
        group = self._groups.get(number)
        if group is not None and group.kind == kind:
            return group, None
        if group is None and len(self._groups) >= MAX_GROUPS:
            return None, None
        former = group
        made = LayerGroup(kind)
        self._groups[number] = made
        return made, former

    def find(self, number: int) -> LayerGroup | None:
        return self._groups.get(number)

    def step_tokens(self, block_tokens: int) -> int:
        """Return the step at whose multiples reuse ends, beside blocks of full attention of `block_tokens`."""
        return lcm(block_tokens, *(group.kind.block_tokens for group in self))

    def reusable_blocks(self, keys: array[int], block_tokens: int) -> int:
        """Of a prompt whose leading blocks have these keys, those at whose end every group has what it needs."""
        step = self.step_tokens(block_tokens) // block_tokens
        end = len(keys) // step * step
        before = -1
        while end != before:  # a group that ends earlier requires another check of the others
            before = end
            for group in self:
                end = group.last_end(keys, end, step, max(1, group.kind.block_tokens // block_tokens))
        return end
