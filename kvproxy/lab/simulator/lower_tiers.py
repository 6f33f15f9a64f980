"""Host memory, disk or a shared store behind an engine's block cache: its contents, and the time to read them.

Blocks are written through at once, as LMCache does, or with `on_eviction` when they leave the engine's memory; a tier
`below` another gets the blocks that leave that one. A prompt is matched in the engine's memory and then, block by
block, on the nearest tier that has the next one; blocks read become the engine's again, and the tier keeps it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvproxy.lab.simulator.engine_io import BlockRemoved, BlockStored, KvEvent
from kvproxy.lab.simulator.retention import Eviction, FrequencyFilter, Future, Ranking, TierSettings


class LowerTier:
    """Blocks by hash. One object may serve several engines as a shared store. Evicted blocks go to `next`."""

    def __init__(self, settings: TierSettings, *, future: Future | None = None) -> None:
        self.settings = settings
        self.next: LowerTier | None = None
        self._held: OrderedDict[int, BlockStored | None] = OrderedDict()  # with the event for `next`
        ranked = settings.eviction is not Eviction.LRU
        self._ranking = Ranking(settings.eviction, settings.capacity_blocks, future=future) if ranked else None
        self._filter = FrequencyFilter(settings.min_uses, settings.capacity_blocks) if settings.min_uses else None
        self._reads = self._writes = 0

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._held

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._held)

    def write(self, event: BlockStored) -> Iterator[KvEvent]:
        """Keep the blocks of an engine's event; announces those that are new, and those that had to go for them."""
        held = self._held
        medium = self.settings.medium
        if self._write_fails():
            return
        admits = None if self._filter is None else self._filter.admits
        new = [block not in held and (admits is None or admits(block)) for block in event.block_hashes]
        for run in find_runs(new):
            yield cut_event(event, run, medium=medium)
        for at, block in enumerate(event.block_hashes):
            if new[at]:
                held[block] = None if self.next is None else cut_event(event, range(at, at + 1))
        self.touch(reversed(event.block_hashes))
        while len(held) > self.settings.capacity_blocks:
            yield from self._give_up()

    def note_prompt(self, block_hashes: Sequence[int]) -> None:
        """Note a finished sequence with these blocks: its end is evicted before its beginning."""
        if self._ranking is not None:
            self._ranking.note_prompt(block_hashes)
        self.touch(reversed(block_hashes))

    def touch(self, block_hashes: Iterable[int]) -> None:
        """Mark held blocks as used, the last of them latest."""
        for block_hash in block_hashes:
            if block_hash in self._held:
                self._held.move_to_end(block_hash)

    def read_fails(self) -> bool:
        """Return True if the read that begins now fails: one in every `failing_reads`."""
        self._reads += 1
        return bool(self.settings.failing_reads) and self._reads % self.settings.failing_reads == 0

    def _write_fails(self) -> bool:
        self._writes += 1
        return bool(self.settings.failing_writes) and self._writes % self.settings.failing_writes == 0

    def _give_up(self) -> Iterator[KvEvent]:
        """One block."""
        held = self._held
        gone = None if self._ranking is None else self._ranking.pick(held.keys, held.__contains__)
        block = next(iter(held)) if gone is None else gone
        event = held.pop(block)
        yield BlockRemoved(block, medium=self.settings.medium)
        if self.next is not None and event is not None:
            yield from self.next.write(event)


@dataclass(slots=True)
class Reads:
    """Part of a prompt to be read from lower tiers."""

    blocks: int = 0  # that follow those in the engine's memory
    seconds: float = 0.0


#: Backlog of an engine's CPU from which new blocks are not compressed.
MAX_BEHIND_S = 10.0


class LowerTiers:
    """Tiers of one engine, the nearest first. Blocks to be compressed arrive when its CPU, which compresses one after
    the other, is done with them."""

    def __init__(self, tiers: Sequence[LowerTier], *, on_eviction: bool = False) -> None:
        self.tiers = tuple(tiers)
        self._written = [tier for at, tier in enumerate(tiers) if not (at and tier.settings.below)]
        for above, tier in pairwise(tiers):
            above.next = tier if tier.settings.below else None
        self._on_eviction = on_eviction
        self._now = self._free_at = 0.0  # of the CPU
        self._compressing: deque[tuple[float, BlockStored]] = deque()
        self.compressed_s = 0.0  # CPU time
        self._told: dict[int, BlockStored] = {}  # by block in the engine's memory, to be written when it leaves

    def advance(self, now: float) -> Iterator[KvEvent]:
        """Add the blocks compressed by now."""
        self._now = now
        while self._compressing and self._compressing[0][0] <= now:
            yield from self._keep(self._compressing.popleft()[1])

    def stored(self, event: BlockStored) -> Iterator[KvEvent]:
        """Yield the engine made these blocks reusable."""
        if not self._on_eviction:
            yield from self._write(event)
            return
        for at, block_hash in enumerate(event.block_hashes):
            self._told[block_hash] = cut_event(event, range(at, at + 1))

    def evicted(self, block_hash: int) -> Iterator[KvEvent]:
        """Yield the events that follow the eviction of the engine's last copy of a block."""
        event = self._told.pop(block_hash, None)
        if event is not None:
            yield from self._write(event)

    def note_prompt(self, block_hashes: Sequence[int]) -> None:
        """Note a finished sequence with these blocks."""
        for tier in self.tiers:
            tier.note_prompt(block_hashes)

    def read(self, block_hashes: Sequence[int], held: int, limit: int) -> Reads:
        """Of a prompt's blocks, of which `held` are in the engine's memory: those up to `limit` that lower tiers have
        next. A read that fails takes its latency, and ends them."""
        reads = Reads()
        at = held
        while at < limit and (tier := self._holder(block_hashes[at])) is not None:
            end = at
            while end < limit and self._holder(block_hashes[end]) is tier:
                end += 1
            settings = tier.settings
            reads.seconds += settings.latency_s
            if tier.read_fails():
                break
            reads.seconds += (end - at) * settings.read_block_s
            reads.blocks += end - at
            at = end
        return reads

    def _holder(self, block_hash: int) -> LowerTier | None:
        return next((tier for tier in self.tiers if block_hash in tier), None)

    def _write(self, event: BlockStored) -> Iterator[KvEvent]:
        cpu_s = max([self._compress_s(tier, event) for tier in self._written], default=0.0)
        if not cpu_s:
            yield from self._keep(event)
        elif self._free_at < self._now + MAX_BEHIND_S:
            self._free_at = max(self._free_at, self._now) + cpu_s
            self.compressed_s += cpu_s
            self._compressing.append((self._free_at, event))

    def _compress_s(self, tier: LowerTier, event: BlockStored) -> float:
        each_s = tier.settings.write_block_s
        return each_s * sum([block not in tier for block in event.block_hashes]) if each_s else 0.0

    def _keep(self, event: BlockStored) -> Iterator[KvEvent]:
        for tier in self._written:
            yield from tier.write(event)


def cut_event(event: BlockStored, run: range, *, medium: str = "") -> BlockStored:
    """Return the same of some neighbours of its blocks, and of another medium."""
    size = len(event.token_ids) // len(event.block_hashes)
    return replace(
        event,
        block_hashes=event.block_hashes[run.start : run.stop],
        parent=event.block_hashes[run.start - 1] if run.start else event.parent,
        token_ids=event.token_ids[run.start * size : run.stop * size],
        extra_keys=event.extra_keys[run.start : run.stop],
        medium=medium or event.medium,
    )


def find_runs(wanted: Sequence[bool]) -> Iterator[range]:
    """Places of neighbours that are wanted."""
    start = 0
    for place, each in enumerate((*wanted, False)):
        if not each:
            if start < place:
                yield range(start, place)
            start = place + 1
