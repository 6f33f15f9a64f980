"""Host memory, disk or a shared store behind an engine's block cache: its contents, and the time to read them.

Blocks are written through at once, as LMCache does; a tier `below` another gets the blocks that leave that one. A
prompt is matched in the engine's memory and then, block by block, on the nearest tier that has the next one; blocks
read become the engine's again, and the tier keeps it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvproxy.lab.simulator.engine_io import BlockRemoved, BlockStored, KvEvent
from kvproxy.lab.simulator.retention import Future, TierSettings, make_ranking


class LowerTier:
    """Blocks by hash. One object may serve several engines as a shared store. Evicted blocks go to `next`."""

    def __init__(self, settings: TierSettings, *, future: Future | None = None) -> None:
        self.settings = settings
        self.next: LowerTier | None = None
        self._held: OrderedDict[int, BlockStored | None] = OrderedDict()  # with the event for `next`
        self._ranking = make_ranking(settings.eviction, settings.capacity_blocks, future=future)
        self._reads = 0

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._held

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._held)

    def write(self, event: BlockStored) -> Iterator[KvEvent]:
        """Keep the blocks of an engine's event; announces those that are new, and those that had to go for them."""
        held = self._held
        medium = self.settings.medium
        new = [block not in held for block in event.block_hashes]
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


class LowerTiers:
    """Tiers of one engine, the nearest first."""

    def __init__(self, tiers: Sequence[LowerTier]) -> None:
        self.tiers = tuple(tiers)
        self._written = [tier for at, tier in enumerate(tiers) if not (at and tier.settings.below)]
        for above, tier in pairwise(tiers):
            above.next = tier if tier.settings.below else None

    def stored(self, event: BlockStored) -> Iterator[KvEvent]:
        """Keep blocks that the engine made reusable; yield what follows."""
        for tier in self._written:
            yield from tier.write(event)

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
