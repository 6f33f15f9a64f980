"""Applies the batches of one stream in order: the last one's number, and what is missing before it. No sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

from kvproxy.base.errors import BadResponse
from kvproxy.cache.indexes.block_events import AllBlocksCleared, KvEvent
from kvproxy.features.kv_events.decoding import KvEventBatch, Skipped, sequence_number, slice_events
from kvproxy.features.kv_events.status import StreamHealth, StreamMeter, StreamReason

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


class StreamApplier:
    """`apply` and `cleared` are the consumer's; others run between slices of `slice_blocks`, and during a `pause`.

    It keeps the last batch applied and the last one seen live, because after a replay the live stream still brings
    batches that were replayed already: those are duplicates, whereas a live number that falls back means a new process.
    """

    def __init__(
        self,
        *,
        apply: Callable[[Sequence[KvEvent]], None],
        cleared: Callable[[], None],
        health: StreamHealth,
        meter: StreamMeter,
        pause: Callable[[], Awaitable[None]],
        slice_blocks: int = 512,
    ) -> None:
        self.meter = meter
        self.applied: int | None = None  # -1: no batch was published yet; None: not known
        self.applied_ts = 0.0  # the engine's wall clock
        self.missing: StreamReason | None = None
        #: A replay failed; to try again after a while may heal that.
        self.wants_retry = False
        self._live: int | None = None
        self._apply = apply
        self._cleared = cleared
        self._health = health
        self._pause = pause
        self._slice_blocks = slice_blocks
        self.since_pause = 0  # work since others last ran, in blocks

    def forget(self) -> None:
        """Nothing is known of what was applied."""
        self.applied = self._live = None
        self.applied_ts = 0.0

    def wipe(self) -> None:
        """Forget the applied batches; the consumer does as well."""
        self.forget()
        self.missing = None
        self._cleared()

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

    async def take(self, batch: KvEventBatch, outcome: str) -> None:
        """Apply a batch; `outcome` is a metric label."""
        missing = self.missing
        skipped: Skipped = {}
        if batch.seq == 0:  # the very first one: no batch is missing before it
            self.missing = None
        for piece, cost in slice_events(batch.steps(skipped), self._slice_blocks):
            self._apply(piece)
            self.meter.count_events(piece)
            if any(isinstance(event, AllBlocksCleared) for event in piece):
                self.missing = None
                self.wants_retry = False
            await self.spend(cost)
        if skipped:
            self.meter.count_skipped(skipped)
            if "malformed" in skipped:
                self.missing = StreamReason.MALFORMED
        self.applied = batch.seq
        self.applied_ts = batch.ts
        self.meter.count_batch(outcome)
        if outcome == "applied":
            self.meter.show_lag(batch.ts)
            self._health.record_batch()
        if self.missing is not missing:
            self._health.mark_incomplete(self.missing)
        await self.spend(MESSAGE_COST_BLOCKS)

    async def pass_over(self, frames: Frames) -> None:
        """Skip an unreadable batch, whose events are lost."""
        self.meter.count_batch("malformed")
        with contextlib.suppress(BadResponse):
            seq = sequence_number(frames)
            if seq is not None and self.applied is not None and seq == self.applied + 1:
                self.applied = seq
        self.missing = StreamReason.MALFORMED
        self._health.mark_incomplete(self.missing)
        await self.spend(MESSAGE_COST_BLOCKS + sum(map(len, frames)) // BYTES_A_BLOCK)

    async def spend(self, blocks: int) -> None:
        """Count work, and let others run after every slice's worth of it."""
        self.since_pause += blocks
        if self.since_pause >= self._slice_blocks:
            self.since_pause = 0
            await self._pause()

    def start_over(self) -> None:
        """Forget the applied batches, until a replay has brought them again."""
        self._health.mark_synchronising()
        self.wipe()

    def mark_synchronised(self) -> None:
        """Show that the stream is followed, with what is missing."""
        self._health.mark_synchronised(self.missing)
