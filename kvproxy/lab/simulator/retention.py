"""Eviction order of a simulated cache: least recently used as in vLLM, or by a ranking of how blocks were used.

A ranking counts time in prompts, remembers blocks for a while after they are gone, as a proxy does that counts what it
routes, and ranks a batch at a time."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from kvproxy.cache.prefix.eviction import Use, Weights, score_use


class Eviction(StrEnum):
    """Eviction order."""

    LRU = "lru"
    LFU = "lfu"  # among equals the longest unused
    WEIGHTED = "weighted"  # by the score that the proxy evicts by
    NEXT_USE = "next_use"  # latest expected next use, by the time between earlier ones
    OPTIMUM = "optimum"  # latest next use: needs the future


#: Weights of rankings by one score.
_WEIGHTS = {Eviction.WEIGHTED: Weights(), Eviction.NEXT_USE: Weights(0.0, 0.0, 0.0, 1.0)}


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Tier below an engine's memory, by its name in events. Every `failing_reads`-th read fails; 0: none. If `below`,
    it gets the blocks evicted from the tier above, any other those of the engine."""

    medium: str
    capacity_blocks: int
    read_block_s: float
    latency_s: float = 0.0
    failing_reads: int = 0
    below: bool = False
    eviction: Eviction = Eviction.LRU

    def __post_init__(self) -> None:
        if self.capacity_blocks < 1 or min(self.read_block_s, self.latency_s, self.failing_reads) < 0:
            raise ValueError("a tier has room for a block at least, and no negative times")


class Future:
    """Times at which blocks are needed, for an optimal ranking. Of several engines it has the times, not the places."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._needed: dict[int, list[int]] = {}  # numbers of prompts, the next one last
        for number in reversed(range(len(prompts))):
            for block in prompts[number]:
                self._needed.setdefault(block, []).append(number)

    def note_prompt(self, block_hashes: Iterable[int]) -> None:
        """One of them was served."""
        for block in block_hashes:
            if needed := self._needed.get(block):
                needed.pop()

    def next_use(self, block: int) -> float:
        """Return the number of the prompt that needs it next; infinite for none."""
        needed = self._needed.get(block)
        return needed[-1] if needed else inf


class _Record:
    """How a block was used. `uses` fade: to half in the time that a block stays."""

    __slots__ = ("count", "depth", "gap", "last", "uses")

    def __init__(self, depth: int, now: int) -> None:
        self.depth = depth
        self.last = now
        self.count = 1
        self.uses = 1.0
        self.gap: float | None = None

    def use_again(self, now: int, span: float) -> None:
        gap = now - self.last
        self.gap = gap if self.gap is None else self.gap + _NEW_GAP * (gap - self.gap)
        self.uses = 1.0 + self.uses * 0.5 ** (gap / span)
        self.count = self.count + 1
        self.last = now


#: Weight of the latest time between two uses in the usual time; and the factor on the usual time of all blocks for the
#: next use of a block used once, since most are never used again.
_NEW_GAP = 0.3
_UNSEEN_GAP = 4.0
#: Blocks remembered for each that there is room for, and the share of them that is ranked at a time.
_REMEMBERED = 4
_BATCH = 1 / 32


class Ranking:
    """Of the blocks of one cache."""

    def __init__(
        self,
        eviction: Eviction,
        capacity_blocks: int,
        *,
        future: Future | None = None,
        weights: Weights | None = None,
    ) -> None:
        if eviction is Eviction.OPTIMUM and future is None:
            raise ValueError("the optimum needs the future: only kvproxy replay plays it")
        self._eviction = eviction
        self._capacity = capacity_blocks
        self._future = future
        self._weights = weights or _WEIGHTS.get(eviction, Weights())
        self._records: OrderedDict[int, _Record] = OrderedDict()
        self._now = self._new = 0
        self._blocks = 0  # of all prompts
        self._gaps = 0
        self._gap_count = 0
        self._next: list[tuple[int, int]] = []  # block and its last use when it was ranked, the first to go last

    def note_prompt(self, block_hashes: Sequence[int]) -> None:
        """Note the use of these blocks, a prompt's from its beginning on, together."""
        self._now += 1
        self._blocks += len(block_hashes)
        records = self._records
        now = self._now
        span = self._span()
        for depth, block in enumerate(block_hashes, 1):
            record = records.get(block)
            if record is None:
                records[block] = _Record(depth, now)
                self._new += 1
            else:
                self._gaps = self._gaps + now - record.last
                self._gap_count = self._gap_count + 1
                record.use_again(now, span)
                records.move_to_end(block)
        while len(records) > _REMEMBERED * self._capacity:
            records.popitem(last=False)

    def pick(self, unused: Callable[[], Iterable[int]], is_unused: Callable[[int], bool]) -> int | None:
        """Return the one of the `unused` blocks that goes first; None where there is none."""
        while True:
            while self._next:
                block, last = self._next.pop()
                if is_unused(block) and self._last_use(block) == last:
                    return block
            candidates = list(unused())
            if not candidates:
                return None
            first = heapq.nlargest(max(1, round(_BATCH * len(candidates))), candidates, key=self._key())
            self._next = [(block, self._last_use(block)) for block in reversed(first)]

    def _last_use(self, block: int) -> int:
        record = self._records.get(block)
        return 0 if record is None else record.last

    def _span(self) -> float:
        """Prompts in which as many new blocks come as there is room for."""
        return max(1.0, self._capacity * self._now / max(1, self._new))

    def _key(self) -> Callable[[int], tuple[float, ...]]:
        """Return the sort key of eviction: the largest goes first; of a prompt's blocks the last one."""
        records = self._records
        now = self._now
        unknown = _Record(1, 0)
        if self._eviction is Eviction.LFU:
            return lambda block: (-(each := records.get(block, unknown)).count, -each.last, each.depth)
        if self._future is not None and self._eviction is Eviction.OPTIMUM:
            next_use = self._future.next_use
            return lambda block: (next_use(block), records.get(block, unknown).depth)
        span = self._span()
        weights = self._weights
        size = self._blocks / max(1, now)
        unseen = _UNSEEN_GAP * self._gaps / self._gap_count if self._gap_count else span

        def key(block: int) -> tuple[float, ...]:
            record = records.get(block, unknown)
            idle = now - record.last
            gap = unseen if record.gap is None else record.gap
            use = Use(record.uses * 0.5 ** (idle / span), record.depth, idle, gap)
            return score_use(use, weights, span=span, size=size), record.depth

        return key


def make_ranking(eviction: Eviction, capacity_blocks: int, *, future: Future | None) -> Ranking | None:
    """None for LRU, which caches have by themselves."""
    return None if eviction is Eviction.LRU else Ranking(eviction, capacity_blocks, future=future)
