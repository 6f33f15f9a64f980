"""A paged prefix cache as vLLM keeps one: physical blocks, reference counts, eviction of unused blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvproxy.lab.simulator.lower_tiers import LowerTiers
from kvproxy.lab.simulator.retention import Ranking


class PrefixCache(ABC):
    """Cache of an engine, and the events that it announces."""

    def __init__(self, capacity_blocks: int, *, record_events: bool = True) -> None:
        if capacity_blocks < 1:
            raise ValueError("a cache needs at least one block")
        self.capacity_blocks = capacity_blocks
        self._record = record_events
        self._events: list[KvEvent] = []

    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """Blocks without a user, reusable ones among them."""

    @property
    def usage(self) -> float:
        """Share of blocks held by running sequences: 0 when idle, however full the prefix cache is."""
        return 1.0 - self.free_blocks / self.capacity_blocks

    @abstractmethod
    def __contains__(self, block_hash: int) -> bool:
        """Return True if a block of this hash is held."""

    def match_prefix(self, block_hashes: Sequence[int], limit: int) -> int:
        """Length in blocks of the longest held prefix, at most `limit`."""
        for index, block_hash in enumerate(block_hashes):
            if index >= limit or block_hash not in self:
                return index
        return min(limit, len(block_hashes))

    @abstractmethod
    def count_idle(self, block_hashes: Sequence[int], count: int) -> int:
        """How many of the first `count` held blocks have no user, that is, leave the free list when acquired."""

    @abstractmethod
    def acquire(self, block_hashes: Sequence[int], count: int) -> list[int]:
        """Take the first `count` held blocks into use."""

    @abstractmethod
    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, forgetting what they held. The caller checked `free_blocks`."""

    @abstractmethod
    def store(self, blocks: Sequence[int], event: BlockStored) -> None:
        """Make the full `blocks` reusable under the event's hashes, one for one, and announce it."""

    @abstractmethod
    def release(self, blocks: Sequence[int]) -> None:
        """End one use of each of a sequence's blocks (given in order); hashes stay until the memory is wanted."""

    @abstractmethod
    def clear(self) -> bool:
        """Forget every hash, unless a sequence is running (False: nothing happened)."""

    def announce(self, event: KvEvent) -> None:
        """Queue an event; `take_events` hands it out."""
        if self._record:
            self._events.append(event)

    def take_events(self) -> list[KvEvent]:
        """Return the events since the last call."""
        events = self._events
        self._events = []
        return events


class BlockCache(PrefixCache):
    """Blocks are numbered; a stored block keeps its hash after its last user left, until its memory is reused.

    The free list is in eviction order, unless a `ranking` shows what goes: callers release a sequence's blocks through
    `release`, which queues its tail first, so that the end of the oldest sequence goes first. One hash may have several
    physical copies (a fully cached prompt recomputes its last block), and evicting any of them is announced, as vLLM
    does.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        record_events: bool = True,
        lower: LowerTiers | None = None,
        ranking: Ranking | None = None,
    ) -> None:
        super().__init__(capacity_blocks, record_events=record_events)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity_blocks))
        self._users = [0] * capacity_blocks
        self._hash_of: list[int | None] = [None] * capacity_blocks
        self._block_of: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._lower = lower
        self._ranking = ranking  # None: the free list's order

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._block_of

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def match_prefix(self, block_hashes: Sequence[int], limit: int) -> int:
        held = self._block_of
        for index, block_hash in enumerate(block_hashes):
            if index >= limit or block_hash not in held:
                return index
        return min(limit, len(block_hashes))

    def count_idle(self, block_hashes: Sequence[int], count: int) -> int:
        users = self._users
        held = self._block_of
        return sum(1 for index in range(count) if users[held[block_hashes[index]]] == 0)

    def acquire(self, block_hashes: Sequence[int], count: int) -> list[int]:
        users = self._users
        held = self._block_of
        free = self._free
        blocks = []
        for index in range(count):
            block = held[block_hashes[index]]
            if users[block] == 0:
                del free[block]
            users[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        blocks = []
        ranked = self._ranking is not None
        for _ in range(count):
            block = self._take_ranked() if ranked else self._free.popitem(last=False)[0]
            block_hash = self._hash_of[block]
            if block_hash is not None:
                self._forget(block, block_hash)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def store(self, blocks: Sequence[int], event: BlockStored) -> None:
        for block, block_hash in zip(blocks, event.block_hashes, strict=True):
            self._hash_of[block] = block_hash
            if self._block_of.setdefault(block_hash, block) != block:
                self._copies.setdefault(block_hash, []).append(block)
        self.announce(event)
        if self._lower is not None:
            for each in self._lower.stored(event):
                self.announce(each)

    def receive(self, block_hashes: Sequence[int]) -> int:
        """Add the missing leading blocks of a prompt that were copied here, if there is room; returns their number."""
        held = self.match_prefix(block_hashes, len(block_hashes))
        blocks = self.acquire(block_hashes, held)  # so that none of them makes room for the others
        count = missing if (missing := len(block_hashes) - held) <= len(self._free) else 0
        blocks += self.allocate(count)
        if count:
            self.store(blocks[held:], BlockStored(tuple(block_hashes[held:]), block_hashes[held - 1] if held else None))
        self.release(blocks)
        return count

    def release(self, blocks: Sequence[int]) -> None:
        users = self._users
        hash_of = self._hash_of
        free = self._free
        for block in reversed(blocks):
            users[block] -= 1
            if users[block] == 0:
                free[block] = None
                if hash_of[block] is None:
                    free.move_to_end(block, last=False)
        if self._lower is not None or self._ranking is not None:
            hashes = [each for block in blocks if (each := hash_of[block]) is not None]
            if self._ranking is not None:
                self._ranking.note_prompt(hashes)
            if self._lower is not None:
                self._lower.note_prompt(hashes)

    def clear(self) -> bool:
        if len(self._free) < self.capacity_blocks:
            return False
        self._block_of.clear()
        self._copies.clear()
        self._hash_of = [None] * self.capacity_blocks
        self.announce(AllBlocksCleared())
        return True

    def _take_ranked(self) -> int:
        """Return the free block that holds nothing, or else what the ranking gives up first."""
        first = next(iter(self._free))
        if self._hash_of[first] is not None and self._ranking is not None:
            gone = self._ranking.pick(self._unused, self._is_unused)
            first = first if gone is None else self._block_of[gone]
        del self._free[first]
        return first

    def _unused(self) -> Iterator[int]:
        hash_of = self._hash_of
        block_of = self._block_of
        return (each for block in self._free if (each := hash_of[block]) is not None and block_of[each] == block)

    def _is_unused(self, block_hash: int) -> bool:
        block = self._block_of.get(block_hash)
        return block is not None and self._users[block] == 0

    def _forget(self, block: int, block_hash: int) -> None:
        self._hash_of[block] = None
        copies = self._copies.get(block_hash)
        if copies is None:
            del self._block_of[block_hash]
        else:
            if self._block_of[block_hash] == block:
                self._block_of[block_hash] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[block_hash]
        self.announce(BlockRemoved(block_hash))
