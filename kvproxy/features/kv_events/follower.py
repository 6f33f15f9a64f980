"""Keeps a consumer in step with one stream: applies batches in order, fills gaps by replays, notices restarts. No
sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from enum import Enum

from kvproxy.base.errors import BadResponse, ClientError, ClientTimeout
from kvproxy.cache.indexes.block_events import AllBlocksCleared, KvEvent
from kvproxy.features.kv_events.decoding import KvEventBatch, Skipped, decode_batch, sequence_number, slice_events
from kvproxy.features.kv_events.status import StreamHealth, StreamMeter, StreamReason

Frames = Sequence[bytes]
#: Messages of a replay from a batch number on, the end marker included; raises ClientError when they stop coming.
Replay = Callable[[int], AsyncGenerator[Frames, None]]

#: Cost of one message besides its blocks, in blocks, and the bytes of it that cost another one.
MESSAGE_COST_BLOCKS = 8
BYTES_A_BLOCK = 512

#: How often a replay with a dropped middle is requested again from the break.
_REPLAY_PASSES = 5

#: A ROUTER drops messages beyond its queue of 1,000, the end of a long replay too: a replay with this many batches is
#: no failure, and is requested again up to this often (vLLM keeps 10,000 batches).
_FRUITFUL_BATCHES = 500
_FRUITFUL_PASSES = 50


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


class StreamFollower:
    """One stream's position and how it gets there. `apply` and `cleared` are the consumer's; others run between slices
    of `slice_blocks`, and during a `pause`."""

    def __init__(
        self,
        *,
        apply: Callable[[Sequence[KvEvent]], None],
        cleared: Callable[[], None],
        replay: Replay | None,
        health: StreamHealth,
        meter: StreamMeter,
        pause: Callable[[], Awaitable[None]],
        slice_blocks: int = 512,
    ) -> None:
        self._apply = apply
        self._cleared = cleared
        self._replay = replay
        self._health = health
        self._meter = meter
        self._pause = pause
        self._slice_blocks = slice_blocks
        self._since_pause = 0  # work since others last ran, in blocks
        self._position = Position()
        self._missing: StreamReason | None = None
        self._was_empty = False  # the latest replay was, although batches had been published
        #: A replay failed; `synchronise` after a while may heal that.
        self.wants_retry = False

    async def synchronise(self) -> None:
        """After (re)connecting: proves that it is still the same process and catches up, or starts over."""
        if self._replay is None:
            if self._position.applied is None:
                self._wipe()
                self._missing = StreamReason.NO_REPLAY
            self._mark_synchronised()
        elif self.wants_retry or not await self._caught_up():
            await self._started_over()

    async def on_message(self, frames: Frames) -> None:
        """One live message."""
        try:
            batch = decode_batch(frames)
        except BadResponse:
            await self._pass_over(frames)
            return
        self._since_pause += len(frames[-1]) // BYTES_A_BLOCK
        if self._position.applied is None:
            await self._first(batch)
            return
        verdict = self._position.judge(batch.seq)
        if verdict is Continuity.NEXT:
            await self._take(batch, "applied")
        elif verdict is Continuity.GAP:
            await self._fill_gap(batch)
        elif verdict is Continuity.RESTART:
            self._meter.count_gap("restart")
            await self._rebuild(batch)
        else:
            self._meter.count_batch(verdict.value)
            await self._breathe(MESSAGE_COST_BLOCKS)

    def forget(self) -> None:
        """Forget the applied batches; the next `synchronise` starts over."""
        self._position.reset()

    async def _first(self, batch: KvEventBatch) -> None:
        """Handle a live batch without known history, which was not available, or not requested yet."""
        if self._replay is None or self.wants_retry:
            await self._join(batch, self._missing or StreamReason.NO_REPLAY)
        else:
            await self._rebuild(batch)

    async def _fill_gap(self, batch: KvEventBatch) -> None:
        if self._replay is not None and await self._caught_up() and self._reaches(batch):
            self._meter.count_gap("filled")
            await self._take_if_next(batch)
        else:
            self._meter.count_gap("lost")
            await self._rebuild(batch)

    async def _rebuild(self, batch: KvEventBatch) -> None:
        """Start over from replay, or from this batch without one; the applied batches are void."""
        if self._replay is None:
            self._wipe()
            await self._join(batch, StreamReason.LOST_EVENTS)
        elif not await self._started_over():
            await self._join(batch, StreamReason.REPLAY_FAILED)
        elif self._reaches(batch):
            await self._take_if_next(batch)
        else:  # batches were published that no replay brings: an empty one does not mean that there were none
            self._was_empty = self._position.applied == -1
            self._wipe()
            await self._join(batch, StreamReason.PARTIAL_HISTORY if self._was_empty else StreamReason.LOST_EVENTS)

    async def _join(self, batch: KvEventBatch, missing: StreamReason | None) -> None:
        """Take up the stream here; only its very first batch leaves nothing behind."""
        self._missing = None if batch.seq == 0 else missing
        self._position.judge(batch.seq)
        await self._take(batch, "applied")
        self._mark_synchronised()

    def _reaches(self, batch: KvEventBatch) -> bool:
        """Return True if no batch before this one is missing."""
        return self._position.applied is not None and batch.seq <= self._position.applied + 1

    async def _take_if_next(self, batch: KvEventBatch) -> None:
        """Apply the live batch after a replay, unless the replay brought it; a new gap shows at the batch after it."""
        if self._position.applied is not None and batch.seq == self._position.applied + 1:
            await self._take(batch, "applied")

    async def _started_over(self) -> bool:
        """Forgets everything and replays all the engine still has; False when it could not deliver."""
        self._wipe()
        delivered = await self._replayed_from(0)
        self.wants_retry = not delivered
        if not delivered:
            self._wipe()
            self._missing = StreamReason.REPLAY_FAILED
        elif self._position.applied is None:
            self._position.advance(-1, 0.0)
            self._missing = StreamReason.PARTIAL_HISTORY if self._was_empty else None
        self._mark_synchronised()
        return delivered

    async def _caught_up(self) -> bool:
        """Apply what was published since; False when continuity cannot be proven."""
        applied = self._position.applied
        if applied is None or not await self._replayed_from(max(applied, 0)):
            return False
        self._mark_synchronised()
        return True

    async def _replayed_from(self, start: int) -> bool:
        """Apply every batch from `start` on that the engine has; False when that did not work."""
        fruitless = 0
        for _ in range(_FRUITFUL_PASSES):
            reached = self._position.applied or 0
            silent = False
            try:
                if await self._replay_once(start):
                    return True
            except ClientTimeout:
                silent = True
            except ClientError:
                return False
            if (self._position.applied or 0) - reached < _FRUITFUL_BATCHES:
                fruitless += 1
                if silent or fruitless == _REPLAY_PASSES:
                    return False
            start = max(self._position.applied or 0, 0)
        return False

    async def _replay_once(self, start: int) -> bool:
        """One replay; False when it had a hole. Raises ClientError when it cannot continue what was applied."""
        assert self._replay is not None
        first = True
        async with contextlib.aclosing(self._replay(start)) as messages:
            async for frames in messages:
                seq = sequence_number(frames)
                if seq is None:
                    break
                if first:
                    self._check_first(seq, frames)
                    first = self._was_empty = False
                await self._breathe(MESSAGE_COST_BLOCKS)  # also for known batches, or after a gap
                if not await self._take_replayed(seq, frames):
                    return False
        if first and self._position.applied not in (None, -1):
            raise BadResponse("kv events: the engine has fewer batches than were applied")
        return True

    def _check_first(self, seq: int, frames: Frames) -> None:
        """Check that the replay begins with the batch applied last (or the first ever); otherwise the history is
        incomplete."""
        applied = self._position.applied
        if applied is None:
            self._missing = StreamReason.PARTIAL_HISTORY if seq > 0 else None
        elif seq > applied + 1:
            raise BadResponse("kv events: the replay starts too late")
        elif seq == applied and decode_batch(frames).ts != self._position.applied_ts:
            raise BadResponse("kv events: another process")

    async def _take_replayed(self, seq: int, frames: Frames) -> bool:
        """Apply the next batch of a replay; False when the one before it is missing."""
        applied = self._position.applied
        if applied is not None and seq <= applied:
            return True
        if applied is not None and seq != applied + 1:
            return False
        try:
            batch = decode_batch(frames)
        except BadResponse:
            await self._pass_over(frames)
            return True
        await self._breathe(len(frames[-1]) // BYTES_A_BLOCK)
        await self._take(batch, "replayed")
        return True

    async def _take(self, batch: KvEventBatch, outcome: str) -> None:
        """Apply a batch; `outcome` is a metric label."""
        missing = self._missing
        skipped: Skipped = {}
        if batch.seq == 0:  # the very first one: no batch is missing before it
            self._missing = None
        for piece, cost in slice_events(batch.steps(skipped), self._slice_blocks):
            self._apply(piece)
            self._meter.count_events(piece)
            if any(isinstance(event, AllBlocksCleared) for event in piece):
                self._missing = None
                self.wants_retry = False
            await self._breathe(cost)
        if skipped:
            self._meter.count_skipped(skipped)
            if "malformed" in skipped:
                self._missing = StreamReason.MALFORMED
        self._position.advance(batch.seq, batch.ts)
        self._meter.count_batch(outcome)
        if outcome == "applied":
            self._meter.show_lag(batch.ts)
            self._health.record_batch()
        if self._missing is not missing:
            self._health.mark_incomplete(self._missing)
        await self._breathe(MESSAGE_COST_BLOCKS)

    async def _pass_over(self, frames: Frames) -> None:
        """Skip an unreadable batch, whose events are lost."""
        self._meter.count_batch("malformed")
        with contextlib.suppress(BadResponse):
            seq = sequence_number(frames)
            applied = self._position.applied
            if seq is not None and applied is not None and seq == applied + 1:
                self._position.advance(seq, self._position.applied_ts)
        self._missing = StreamReason.MALFORMED
        self._health.mark_incomplete(self._missing)
        await self._breathe(MESSAGE_COST_BLOCKS + sum(map(len, frames)) // BYTES_A_BLOCK)

    async def _breathe(self, blocks: int) -> None:
        """Lets others run after every slice's worth of work."""
        self._since_pause += blocks
        if self._since_pause >= self._slice_blocks:
            self._since_pause = 0
            await self._pause()

    def _wipe(self) -> None:
        """Forget the applied batches; the consumer does as well."""
        self._position.reset()
        self._missing = None
        self._cleared()

    def _mark_synchronised(self) -> None:
        """Show that the stream is followed, with what is missing."""
        self._health.mark_synchronised(self._missing)
