"""Application of KV event batches in slices; keeps the last applied one and the missing part."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

from kvproxy.base.errors import BadResponse
from kvproxy.cache.kv_events.events import (
    AllBlocksCleared,
    KvEvent,
    KvEventBatch,
    Skipped,
    sequence_number,
    slice_events,
)
from kvproxy.cache.kv_events.status import StreamHealth, StreamMeter, StreamReason

Frames = Sequence[bytes]

#: Cost of one message besides its blocks, in blocks, and the bytes of it that cost another one.
MESSAGE_COST_BLOCKS = 8
BYTES_A_BLOCK = 512


class Continuity(Enum):
    """Position of a live batch relative to the applied ones."""

    NEXT = "next"
    DUPLICATE = "duplicate"  # already brought by a replay
    GAP = "gap"  # batches before it are missing
    RESTART = "restart"  # the publisher counts from 0 again: a new process


class Position:
    """The last batch applied, and the last one seen live.

    Two numbers, because after a replay the live stream still brings batches that were replayed already: those are
    duplicates, whereas a live number that falls back means a new process.
    """

    def __init__(self) -> None:
        self.applied: int | None = None  # -1: no batch was published yet; None: not known
        self.applied_ts = 0.0  # the engine's wall clock
        self._live: int | None = None

    def reset(self) -> None:
        """Nothing is known."""
        self.applied = self._live = None
        self.applied_ts = 0.0

    def advance(self, seq: int, ts: float) -> None:
        """Batch `seq` was applied."""
        self.applied = seq
        self.applied_ts = ts

    def judge(self, seq: int) -> Continuity:
        """Return what live batch `seq` is."""
        applied = -1 if self.applied is None else self.applied
        restarted = self._live is not None and seq <= self._live
        self._live = seq
        if restarted:
            return Continuity.RESTART
        if seq <= applied:
            return Continuity.DUPLICATE
        return Continuity.NEXT if seq == applied + 1 else Continuity.GAP


class BatchApplier:
    """Applies batches of one stream to its consumer (`apply`, `cleared`), and lets others run between slices."""

    def __init__(
        self,
        *,
        apply: Callable[[Sequence[KvEvent]], None],
        cleared: Callable[[], None],
        health: StreamHealth,
        meter: StreamMeter,
        pause: Callable[[], Awaitable[None]],
        slice_blocks: int,
    ) -> None:
        self._apply = apply
        self._cleared = cleared
        self._health = health
        self._meter = meter
        self._pause = pause
        self._slice_blocks = slice_blocks
        #: Work since others last ran, in blocks.
        self.since_pause = 0
        self.position = Position()
        self.missing: StreamReason | None = None
        #: A replay failed; another one after a while may succeed.
        self.wants_retry = False

    def mark_synchronised(self) -> None:
        """Show that the stream is followed, with what is missing."""
        self._health.mark_synchronised(self.missing)

    def wipe(self) -> None:
        """Forget the applied batches; the consumer does as well."""
        self.position.reset()
        self.missing = None
        self._cleared()

    async def take(self, batch: KvEventBatch, outcome: str) -> None:
        """Apply a batch; `outcome` is a metric label."""
        missing = self.missing
        skipped: Skipped = {}
        if batch.seq == 0:  # the very first one: no batch is missing before it
            self.missing = None
        for piece, cost in slice_events(batch.steps(skipped), self._slice_blocks):
            self._apply(piece)
            self._meter.count_events(piece)
            for event in piece:
                if isinstance(event, AllBlocksCleared):
                    self.missing = None
                    self.wants_retry = False
            await self.breathe(cost)
        if skipped:
            self._meter.count_skipped(skipped)
            if "malformed" in skipped:
                self.missing = StreamReason.MALFORMED
        self.position.advance(batch.seq, batch.ts)
        self._meter.count_batch(outcome)
        if outcome == "applied":
            self._meter.show_lag(batch.ts)
            self._health.record_batch()
        if self.missing is not missing:
            self._health.mark_incomplete(self.missing)
        await self.breathe(MESSAGE_COST_BLOCKS)

    async def breathe(self, blocks: int) -> None:
        """Lets others run after every slice's worth of work."""
        self.since_pause += blocks
        if self.since_pause >= self._slice_blocks:
            self.since_pause = 0
            await self._pause()

    async def pass_over(self, frames: Frames) -> None:
        """Skip an unreadable batch, whose events are lost."""
        self._meter.count_batch("malformed")
        with contextlib.suppress(BadResponse):
            seq = sequence_number(frames)
            applied = self.position.applied
            if seq is not None and applied is not None and seq == applied + 1:
                self.position.advance(seq, self.position.applied_ts)
        self.missing = StreamReason.MALFORMED
        self._health.mark_incomplete(self.missing)
        await self.breathe(MESSAGE_COST_BLOCKS + sum(map(len, frames)) // BYTES_A_BLOCK)
