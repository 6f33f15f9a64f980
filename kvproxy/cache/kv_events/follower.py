"""Keeps a consumer in step with one stream: applies batches in order, fills gaps, notices restarts. No sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvproxy.base.errors import BadResponse
from kvproxy.cache.kv_events.applier import BYTES_A_BLOCK, MESSAGE_COST_BLOCKS, BatchApplier, Continuity, Frames
from kvproxy.cache.kv_events.events import KvEvent, KvEventBatch, decode_batch
from kvproxy.cache.kv_events.replays import Replay, Replays
from kvproxy.cache.kv_events.status import StreamHealth, StreamMeter, StreamReason


class StreamFollower:
    """One stream's position and how it gets there. `apply` and `cleared` are the consumer's."""

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
        self._applier = BatchApplier(
            apply=apply, cleared=cleared, health=health, meter=meter, pause=pause, slice_blocks=slice_blocks
        )
        self._position = self._applier.position
        self._replays = None if replay is None else Replays(replay, self._applier)
        self._meter = meter

    @property
    def wants_retry(self) -> bool:
        """Return True if a replay failed; `synchronise` after a while may heal that."""
        return self._applier.wants_retry

    async def synchronise(self) -> None:
        """After (re)connecting: proves that it is still the same process and catches up, or starts over."""
        if self._replays is None:
            if self._position.applied is None:
                self._applier.wipe()
                self._applier.missing = StreamReason.NO_REPLAY
            self._applier.mark_synchronised()
        elif self.wants_retry or not await self._caught_up(self._replays):
            await self._started_over(self._replays)

    async def on_message(self, frames: Frames) -> None:
        """One live message."""
        try:
            batch = decode_batch(frames)
        except BadResponse:
            await self._applier.pass_over(frames)
            return
        self._applier.since_pause += len(frames[-1]) // BYTES_A_BLOCK
        if self._position.applied is None:
            await self._first(batch)
            return
        verdict = self._position.judge(batch.seq)
        if verdict is Continuity.NEXT:
            await self._applier.take(batch, "applied")
        elif verdict is Continuity.GAP:
            await self._fill_gap(batch)
        elif verdict is Continuity.RESTART:
            self._meter.count_gap("restart")
            await self._rebuild(batch)
        else:
            self._meter.count_batch(verdict.value)
            await self._applier.breathe(MESSAGE_COST_BLOCKS)

    def forget(self) -> None:
        """Forget the applied batches; the next `synchronise` starts over."""
        self._position.reset()

    async def _first(self, batch: KvEventBatch) -> None:
        """Handle a live batch without known history, which was not available, or not requested yet."""
        if self._replays is None or self.wants_retry:
            await self._join(batch, self._applier.missing or StreamReason.NO_REPLAY)
        else:
            await self._rebuild(batch)

    async def _fill_gap(self, batch: KvEventBatch) -> None:
        if self._replays is not None and await self._caught_up(self._replays) and self._reaches(batch):
            self._meter.count_gap("filled")
            await self._take_if_next(batch)
        else:
            self._meter.count_gap("lost")
            await self._rebuild(batch)

    async def _rebuild(self, batch: KvEventBatch) -> None:
        """Start over from replay, or from this batch without one; the applied batches are void."""
        if self._replays is None:
            self._applier.wipe()
            await self._join(batch, StreamReason.LOST_EVENTS)
        elif not await self._started_over(self._replays):
            await self._join(batch, StreamReason.REPLAY_FAILED)
        elif self._reaches(batch):
            await self._take_if_next(batch)
        else:
            await self._join_beyond_replay(batch, self._replays)

    async def _join_beyond_replay(self, batch: KvEventBatch, replays: Replays) -> None:
        """Batches were published that no replay brings: an empty one does not mean that there were none."""
        replays.was_empty = self._position.applied == -1
        self._applier.wipe()
        await self._join(batch, StreamReason.PARTIAL_HISTORY if replays.was_empty else StreamReason.LOST_EVENTS)

    async def _join(self, batch: KvEventBatch, missing: StreamReason | None) -> None:
        """Take up the stream here; only its very first batch leaves nothing behind."""
        self._applier.missing = None if batch.seq == 0 else missing
        self._position.judge(batch.seq)
        await self._applier.take(batch, "applied")
        self._applier.mark_synchronised()

    def _reaches(self, batch: KvEventBatch) -> bool:
        """Return True if no batch before this one is missing."""
        return self._position.applied is not None and batch.seq <= self._position.applied + 1

    async def _take_if_next(self, batch: KvEventBatch) -> None:
        """Apply the live batch after a replay, unless the replay brought it; a new gap shows at the batch after it."""
        if self._position.applied is not None and batch.seq == self._position.applied + 1:
            await self._applier.take(batch, "applied")

    async def _started_over(self, replays: Replays) -> bool:
        """Forgets everything and replays all the engine still has; False when it could not deliver."""
        self._applier.wipe()
        delivered = await replays.apply_from(0)
        self._applier.wants_retry = not delivered
        if not delivered:
            self._applier.wipe()
            self._applier.missing = StreamReason.REPLAY_FAILED
        elif self._position.applied is None:
            self._position.advance(-1, 0.0)
            self._applier.missing = StreamReason.PARTIAL_HISTORY if replays.was_empty else None
        self._applier.mark_synchronised()
        return delivered

    async def _caught_up(self, replays: Replays) -> bool:
        """Apply what was published since; False when continuity cannot be proven."""
        applied = self._position.applied
        if applied is None or not await replays.apply_from(max(applied, 0)):
            return False
        self._applier.mark_synchronised()
        return True
