"""Replays: the batches that an engine still has, requested from a number on and applied in order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

from kvproxy.base.errors import BadResponse, ClientError, ClientTimeout
from kvproxy.cache.kv_events.applier import BYTES_A_BLOCK, MESSAGE_COST_BLOCKS, BatchApplier, Frames
from kvproxy.cache.kv_events.events import decode_batch, sequence_number
from kvproxy.cache.kv_events.status import StreamReason

#: Messages of a replay from a batch number on, the end marker included; raises ClientError when they stop coming.
Replay = Callable[[int], AsyncGenerator[Frames, None]]

#: How often a replay with a dropped middle is requested again from the break.
_REPLAY_PASSES = 5

#: A ROUTER drops messages beyond its queue of 1,000, the end of a long replay too: a replay with this many batches is
#: no failure, and is requested again up to this often (vLLM keeps 10,000 batches).
_FRUITFUL_BATCHES = 500
_FRUITFUL_PASSES = 50


class Replays:
    """Replays of one stream; `read` requests one."""

    def __init__(self, read: Replay, applier: BatchApplier) -> None:
        self.read = read
        self._applier = applier
        self.was_empty = False  # although batches had been published

    async def apply_from(self, start: int) -> bool:
        """Apply every batch from `start` on that the engine has; False when that did not work."""
        fruitless = 0
        for _ in range(_FRUITFUL_PASSES):
            reached = self._applier.position.applied or 0
            silent = False
            try:
                if await self._apply_once(start):
                    return True
            except ClientTimeout:
                silent = True
            except ClientError:
                return False
            if (self._applier.position.applied or 0) - reached < _FRUITFUL_BATCHES:
                fruitless += 1
                if silent or fruitless == _REPLAY_PASSES:
                    return False
            start = max(self._applier.position.applied or 0, 0)
        return False

    async def _apply_once(self, start: int) -> bool:
        """One replay; False when it had a hole. Raises ClientError when it cannot continue what was applied."""
        first = True
        async with contextlib.aclosing(self.read(start)) as messages:
            async for frames in messages:
                seq = sequence_number(frames)
                if seq is None:
                    break
                if first:
                    self._check_first(seq, frames)
                    first = self.was_empty = False
                await self._applier.breathe(MESSAGE_COST_BLOCKS)  # also for known batches, or after a gap
                if not await self._take(seq, frames):
                    return False
        if first and self._applier.position.applied not in (None, -1):
            raise BadResponse("kv events: the engine has fewer batches than were applied")
        return True

    def _check_first(self, seq: int, frames: Frames) -> None:
        """Check that the replay begins with the batch applied last (or the first ever); otherwise the history is
        incomplete."""
        applied = self._applier.position.applied
        if applied is None:
            self._applier.missing = StreamReason.PARTIAL_HISTORY if seq > 0 else None
        elif seq > applied + 1:
            raise BadResponse("kv events: the replay starts too late")
        elif seq == applied and decode_batch(frames).ts != self._applier.position.applied_ts:
            raise BadResponse("kv events: another process")

    async def _take(self, seq: int, frames: Frames) -> bool:
        """Apply the next batch of a replay; False when the one before it is missing."""
        applied = self._applier.position.applied
        if applied is not None and seq <= applied:
            return True
        if applied is not None and seq != applied + 1:
            return False
        try:
            batch = decode_batch(frames)
        except BadResponse:
            await self._applier.pass_over(frames)
            return True
        await self._applier.breathe(len(frames[-1]) // BYTES_A_BLOCK)
        await self._applier.take(batch, "replayed")
        return True
