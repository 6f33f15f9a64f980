"""Host memory, disk or a shared store behind an engine's block cache: what it keeps, and what reading it takes.

Everything that an engine stores is written through at once, as LMCache does, or with `on_eviction` only what leaves its
memory. The least recently used goes first. A prompt is matched in the engine's memory and then, block by block, on the
nearest tier that has the next one; what is read becomes the engine's again, and the tier keeps it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvproxy.simulator.engine_io import BlockRemoved, BlockStored, KvEvent, TierSettings


class LowerTier:
    """Blocks by hash. One object may stand behind several engines: a shared store."""

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings
        self._held: OrderedDict[int, None] = OrderedDict()
        self._reads = 0

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._held

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._held)

    def write(self, event: BlockStored) -> Iterator[KvEvent]:
        """Keeps the blocks of an engine's event; announces those that are new, and those that had to go for them."""
        held, medium = self._held, self.settings.medium
        for run in _runs([block not in held for block in event.block_hashes]):
            parent = event.block_hashes[run.start - 1] if run.start else event.parent
            size = len(event.token_ids) // len(event.block_hashes)
            yield replace(
                event,
                block_hashes=event.block_hashes[run.start : run.stop],
                parent=parent,
                token_ids=event.token_ids[run.start * size : run.stop * size],
                extra_keys=event.extra_keys[run.start : run.stop],
                medium=medium,
            )
        held.update(dict.fromkeys(event.block_hashes))
        self.touch(reversed(event.block_hashes))
        while len(held) > self.settings.capacity_blocks:
            yield BlockRemoved(held.popitem(last=False)[0], medium=medium)

    def touch(self, block_hashes: Iterable[int]) -> None:
        """Those that are held are used, the last of them latest."""
        for block_hash in block_hashes:
            if block_hash in self._held:
                self._held.move_to_end(block_hash)

    def fails(self) -> bool:
        """Whether the read that begins now fails: each one of so many does."""
        self._reads += 1
        return bool(self.settings.failing_reads) and self._reads % self.settings.failing_reads == 0


@dataclass(slots=True)
class Reads:
    """What a prompt is to be given from lower tiers."""

    blocks: int = 0  # that follow those in the engine's memory
    seconds: float = 0.0


class LowerTiers:
    """Those of one engine, the nearest first."""

    def __init__(self, tiers: Sequence[LowerTier], *, on_eviction: bool = False) -> None:
        self.tiers = tuple(tiers)
        self._on_eviction = on_eviction
        self._told: dict[int, BlockStored] = {}  # by block in the engine's memory, to be written when it leaves

    def stored(self, event: BlockStored) -> Iterator[KvEvent]:
        """The engine made these blocks reusable."""
        if not self._on_eviction:
            yield from self._write(event)
            return
        size = len(event.token_ids) // len(event.block_hashes)
        parents = (event.parent, *event.block_hashes)
        for at, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[at * size : (at + 1) * size]
            keys = event.extra_keys[at : at + 1]
            self._told[block_hash] = replace(
                event, block_hashes=(block_hash,), parent=parents[at], token_ids=tokens, extra_keys=keys
            )

    def evicted(self, block_hash: int) -> Iterator[KvEvent]:
        """The engine's last copy of a block goes."""
        event = self._told.pop(block_hash, None)
        if event is not None:
            yield from self._write(event)

    def used(self, block_hashes: Sequence[int]) -> None:
        """A sequence with these blocks is over: its end is to go before its beginning."""
        for tier in self.tiers:
            tier.touch(reversed(block_hashes))

    def read(self, block_hashes: Sequence[int], held: int, limit: int) -> Reads:
        """Of a prompt's blocks, of which `held` are in the engine's memory: those up to `limit` that lower tiers have
        next. A read that fails takes its latency, and ends them."""
        reads, at = Reads(), held
        while at < limit and (tier := self._holder(block_hashes[at])) is not None:
            end = at
            while end < limit and self._holder(block_hashes[end]) is tier:
                end += 1
            settings = tier.settings
            reads.seconds += settings.latency_s
            if tier.fails():
                break
            reads.seconds += (end - at) * settings.read_block_s
            reads.blocks += end - at
            at = end
        return reads

    def _holder(self, block_hash: int) -> LowerTier | None:
        return next((tier for tier in self.tiers if block_hash in tier), None)

    def _write(self, event: BlockStored) -> Iterator[KvEvent]:
        for tier in self.tiers:
            yield from tier.write(event)


def _runs(wanted: Sequence[bool]) -> Iterator[range]:
    """Places of neighbours that are wanted."""
    start = 0
    for place, each in enumerate((*wanted, False)):
        if not each:
            if start < place:
                yield range(start, place)
            start = place + 1
