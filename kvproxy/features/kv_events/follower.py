"""Keeps a consumer in step with one stream: fills gaps by replays, notices restarts. No sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

from kvproxy.base.errors import BadResponse, ClientError, ClientTimeout
from kvproxy.features.kv_events.applier import (
    BYTES_A_BLOCK,
    MESSAGE_COST_BLOCKS,
    Continuity,
    Frames,
    StreamApplier,
)
from kvproxy.features.kv_events.decoding import KvEventBatch, decode_batch, sequence_number
from kvproxy.features.kv_events.status import StreamReason

#: Messages of a replay from a batch number on, the end marker included; raises ClientError when they stop coming.
Replay = Callable[[int], AsyncGenerator[Frames, None]]

#: How often a replay with a dropped middle is requested again from the break.
_REPLAY_PASSES = 5

#: A ROUTER drops messages beyond its queue of 1,000, the end of a long replay too: a replay with this many batches is
#: no failure, and is requested again up to this often (vLLM keeps 10,000 batches).
_FRUITFUL_BATCHES = 500
_FRUITFUL_PASSES = 50


class Replays:
    """Replays of one stream into its applier."""

    def __init__(self, applier: StreamApplier, replay: Replay) -> None:
        self._applier = applier
        self._replay = replay
        self.was_empty = False  # the latest one was, although batches had been published

    async def apply_from(self, start: int) -> bool:
        """Apply every batch from `start` on that the engine has; False when that did not work."""
        fruitless = 0
        for _ in range(_FRUITFUL_PASSES):
            reached = self._applier.applied or 0
            silent = False
            try:
                if await self._replay_once(start):
                    return True
            except ClientTimeout:
                silent = True
            except ClientError:
                return False
            if (self._applier.applied or 0) - reached < _FRUITFUL_BATCHES:
                fruitless += 1
                if silent or fruitless == _REPLAY_PASSES:
                    return False
            start = max(self._applier.applied or 0, 0)
        return False

    async def _replay_once(self, start: int) -> bool:
        """One replay; False when it had a hole. Raises ClientError when it cannot continue what was applied."""
        first = True
        async with contextlib.aclosing(self._replay(start)) as messages:
            async for frames in messages:
                seq = sequence_number(frames)
                if seq is None:
                    break
                if first:
                    self._check_first(seq, frames)
                    first = self.was_empty = False
                await self._applier.spend(MESSAGE_COST_BLOCKS)  # also for known batches, or after a gap
                if not await self._take(seq, frames):
                    return False
        if first and self._applier.applied not in (None, -1):
            raise BadResponse("kv events: the engine has fewer batches than were applied")
        return True

    def _check_first(self, seq: int, frames: Frames) -> None:
        """Check that the replay begins with the batch applied last (or the first ever); otherwise the history is
        incomplete."""
        applied = self._applier.applied
        if applied is None:
            self._applier.missing = StreamReason.PARTIAL_HISTORY if seq > 0 else None
        elif seq > applied + 1:
            raise BadResponse("kv events: the replay starts too late")
        elif seq == applied and decode_batch(frames).ts != self._applier.applied_ts:
            raise BadResponse("kv events: another process")

    async def _take(self, seq: int, frames: Frames) -> bool:
        """Apply the next batch of a replay; False when the one before it is missing."""
        applied = self._applier.applied
        if applied is not None and seq <= applied:
            return True
        if applied is not None and seq != applied + 1:
            return False
        try:
            batch = decode_batch(frames)
        except BadResponse:
            await self._applier.pass_over(frames)
            return True
        await self._applier.spend(len(frames[-1]) // BYTES_A_BLOCK)
        await self._applier.take(batch, "replayed")
        return True


class StreamFollower:
    """Decides what to do about each live message, and after a new connection; without a `replay` gaps stay."""

    def __init__(self, applier: StreamApplier, *, replay: Replay | None) -> None:
        self._applier = applier
        self._replays = None if replay is None else Replays(applier, replay)

    async def synchronise(self) -> None:
        """After (re)connecting: proves that it is still the same process and catches up, or starts over."""
        applier = self._applier
        if self._replays is None:
            if applier.applied is None:
                applier.wipe()
                applier.missing = StreamReason.NO_REPLAY
            applier.mark_synchronised()
        elif applier.wants_retry or not await self._caught_up(self._replays):
            await self._started_over(self._replays)

    async def on_message(self, frames: Frames) -> None:
        """One live message."""
        applier = self._applier
        try:
            batch = decode_batch(frames)
        except BadResponse:
            await applier.pass_over(frames)
            return
        applier.since_pause += len(frames[-1]) // BYTES_A_BLOCK
        if applier.applied is None:
            await self._first(batch)
            return
        verdict = applier.judge(batch.seq)
        if verdict is Continuity.NEXT:
            await applier.take(batch, "applied")
        elif verdict is Continuity.GAP:
            await self._fill_gap(batch)
        elif verdict is Continuity.RESTART:
            applier.meter.count_gap("restart")
            await self._rebuild(batch)
        else:
            applier.meter.count_batch(verdict.value)
            await applier.spend(MESSAGE_COST_BLOCKS)

    async def _first(self, batch: KvEventBatch) -> None:
        """Handle a live batch without known history, which was not available, or not requested yet."""
        if self._replays is None or self._applier.wants_retry:
            await self._join(batch, self._applier.missing or StreamReason.NO_REPLAY)
        else:
            await self._rebuild(batch)

    async def _fill_gap(self, batch: KvEventBatch) -> None:
        if self._replays is not None and await self._caught_up(self._replays) and self._reaches(batch):
            self._applier.meter.count_gap("filled")
            await self._take_if_next(batch)
        else:
            self._applier.meter.count_gap("lost")
            await self._rebuild(batch)

    async def _rebuild(self, batch: KvEventBatch) -> None:
        """Start over from replay, or from this batch without one; the applied batches are void."""
        replays = self._replays
        if replays is None:
            self._applier.wipe()
            await self._join(batch, StreamReason.LOST_EVENTS)
        elif not await self._started_over(replays):
            await self._join(batch, StreamReason.REPLAY_FAILED)
        elif self._reaches(batch):
            await self._take_if_next(batch)
        else:  # batches were published that no replay brings: an empty one does not mean that there were none
            replays.was_empty = self._applier.applied == -1
            self._applier.wipe()
            await self._join(batch, StreamReason.PARTIAL_HISTORY if replays.was_empty else StreamReason.LOST_EVENTS)

    async def _join(self, batch: KvEventBatch, missing: StreamReason | None) -> None:
        """Take up the stream here; only its very first batch leaves nothing behind."""
        self._applier.missing = None if batch.seq == 0 else missing
        self._applier.judge(batch.seq)
        await self._applier.take(batch, "applied")
        self._applier.mark_synchronised()

    def _reaches(self, batch: KvEventBatch) -> bool:
        """Return True if no batch before this one is missing."""
        return self._applier.applied is not None and batch.seq <= self._applier.applied + 1

    async def _take_if_next(self, batch: KvEventBatch) -> None:
        """Apply the live batch after a replay, unless the replay brought it; a new gap shows at the batch after it."""
        if self._applier.applied is not None and batch.seq == self._applier.applied + 1:
            await self._applier.take(batch, "applied")

    async def _started_over(self, replays: Replays) -> bool:
        """Forgets everything and replays all the engine still has; False when it could not deliver."""
        applier = self._applier
        applier.start_over()
        delivered = await replays.apply_from(0)
        applier.wants_retry = not delivered
        if not delivered:
            applier.wipe()
            applier.missing = StreamReason.REPLAY_FAILED
        elif applier.applied is None:
            applier.applied = -1
            applier.missing = StreamReason.PARTIAL_HISTORY if replays.was_empty else None
        applier.mark_synchronised()
        return delivered

    async def _caught_up(self, replays: Replays) -> bool:
        """Apply what was published since; False when continuity cannot be proven."""
        applied = self._applier.applied
        if applied is None or not await replays.apply_from(max(applied, 0)):
            return False
        self._applier.mark_synchronised()
        return True
