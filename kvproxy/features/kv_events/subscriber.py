"""Subscription to the KV events of one engine's data-parallel rank, which feeds a consumer while it is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, Self

from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Sleep
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.cache.indexes.block_events import KvEvent
from kvproxy.features.kv_events.applier import StreamApplier
from kvproxy.features.kv_events.follower import StreamFollower
from kvproxy.features.kv_events.sockets import Subscription, read_replay
from kvproxy.features.kv_events.status import StreamHealth, StreamMeter, StreamReason, StreamState, StreamStatus
from kvproxy.features.kv_events.zmtp import ReceiveMemory

log = logging.getLogger(__name__)

_BACKOFF_S = 1.0
_BACKOFF_MAX_S = 30.0

#: Batches applied before the connection is checked again.
_DRAINED_AT_ONCE = 2000

#: Bytes, or time, without a moment in which all of it was applied, after which a stream is behind.
BEHIND_BYTES = 64 << 20
BEHIND_S = 5.0


class KvEventConsumer(Protocol):
    """The receiver of the events (a precise index). Calls come from one task, in order, and must not block."""

    def apply(self, endpoint: EndpointId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        """Apply events in order, at most a slice of blocks at once; stores may repeat known blocks."""
        ...

    def cleared(self, endpoint: EndpointId, dp_rank: int) -> None:
        """Forget everything about this rank: the engine restarted, or its history is void."""
        ...

    def state_changed(self, endpoint: EndpointId, dp_rank: int, status: StreamStatus) -> None:
        """How far the stream can be trusted from now on."""
        ...


class KvEventSubscriber(BackgroundTask):
    """Subscription to one stream. An async context manager: inside it a task subscribes, reconnects, replays and
    applies.

    `wall_clock` gives seconds since the epoch, for the lag. `block_tokens` (any size not below the engine's) and
    `silence_s` decide when an engine that prefills without publishing counts as silent. `replay_memory` bounds what
    replays hold, together with those of other streams that share it."""

    def __init__(
        self,
        endpoint: EndpointId,
        source: KvEventSource,
        *,
        consumer: KvEventConsumer,
        metrics: Metrics,
        clock: Clock,
        wall_clock: Clock,
        slice_blocks: int = 512,
        replay_timeout_s: float = 5.0,
        silence_s: float = 30.0,
        block_tokens: int = 128,
        retry_s: float = _BACKOFF_S,
        replay_memory: ReceiveMemory | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.endpoint = endpoint
        self.source = source
        self._consumer = consumer
        self._replay_timeout_s = replay_timeout_s
        self._retry_s = retry_s
        self._replay_memory = replay_memory
        # since all that had come was applied
        self._unbroken_bytes = 0
        self._unbroken_since = 0.0
        self._clock = clock
        self._sleep = sleep
        self._meter = StreamMeter(metrics, endpoint, source.dp_rank, wall_clock=wall_clock)
        self._health = StreamHealth(
            changed=self._state_changed, clock=clock, silence_s=silence_s, block_tokens=block_tokens
        )
        self._applier = StreamApplier(
            apply=lambda events: consumer.apply(endpoint, source.dp_rank, events),
            cleared=lambda: consumer.cleared(endpoint, source.dp_rank),
            health=self._health,
            meter=self._meter,
            pause=lambda: asyncio.sleep(0),
            slice_blocks=slice_blocks,
        )
        self._follower = StreamFollower(self._applier, replay=self._replay if source.replay_endpoint else None)
        self._in_trouble = False
        self._said: StreamStatus | None = None
        self.task_name = f"kv events {endpoint}/{source.dp_rank}"

    @property
    def status(self) -> StreamStatus:
        """How far the stream can be trusted now."""
        return self._health.status

    @property
    def troubled_s(self) -> float | None:
        """For how long the stream has not been exact; None: it is."""
        since = self._health.troubled_since
        return None if since is None else self._clock() - since

    def note_traffic(self, uncached_tokens: int) -> None:
        """Note that the engine prefilled this many tokens of one request; blocks for them should have been
        announced."""
        self._health.record_traffic(uncached_tokens)

    async def __aenter__(self) -> Self:
        self._meter.show_state(self.status)
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        self._meter.close()

    async def _run(self) -> None:
        pause_s = self._retry_s
        while True:
            started = self._clock()
            try:
                await self._follow()
            except Exception:  # any error of the consumer: the stream is rebuilt, and its index with it
                log.exception("[kvcache] KV events of %s/%d: starting over", self.endpoint, self.source.dp_rank)
                self._applier.forget()
                self._health.mark_failed()
            pause_s = self._retry_s if self._clock() - started > _BACKOFF_MAX_S else min(2 * pause_s, _BACKOFF_MAX_S)
            await self._sleep(pause_s)

    async def _follow(self) -> None:
        """Serve one subscription; ends only by an error."""
        subscription = Subscription(self.source)
        self._unbroken_bytes = 0
        retry_at: float | None = None
        pause_s = self._retry_s
        try:
            while True:
                await subscription.wait_for_news(None if retry_at is None else max(0.0, retry_at - self._clock()))
                changes = subscription.take_connections()
                reconnected = bool(changes) and self._note_connections(changes)
                # The rest of the old connection comes first, so that the synchronisation also covers it.
                await self._drain(subscription)
                if reconnected or (retry_at is not None and self._clock() >= retry_at):
                    await self._follower.synchronise()
                if not self._applier.wants_retry:
                    retry_at = None
                    pause_s = self._retry_s
                elif retry_at is None or self._clock() >= retry_at:
                    retry_at = self._clock() + pause_s
                    pause_s = min(2 * pause_s, _BACKOFF_MAX_S)
        finally:
            subscription.close()

    def _note_connections(self, changes: list[bool]) -> bool:
        for up in changes:
            if up:
                self._health.mark_connected()
            else:
                self._unbroken_bytes = 0
                self._health.mark_disconnected()
        return True in changes and changes[-1]

    async def _drain(self, subscription: Subscription) -> None:
        for _ in range(_DRAINED_AT_ONCE):
            frames = subscription.take_message()
            if frames is None:
                self._unbroken_bytes = 0
                self._health.fell_behind(False)
                return
            self._count(sum(map(len, frames)))
            await self._follower.on_message(frames)

    def _count(self, size: int) -> None:
        """Another message, of `size` bytes, of which it is not known whether it is the last that waits."""
        if not self._unbroken_bytes:
            self._unbroken_since = self._clock()
        self._unbroken_bytes += size
        behind = self._unbroken_bytes > BEHIND_BYTES or self._clock() - self._unbroken_since > BEHIND_S
        if behind and self._health.fell_behind(True):
            self._meter.count_behind()

    def _replay(self, start: int) -> AsyncGenerator[list[bytes], None]:
        address = self.source.replay_endpoint
        assert address is not None
        return read_replay(address, start, idle_timeout_s=self._replay_timeout_s, memory=self._replay_memory)

    def _state_changed(self, status: StreamStatus) -> None:
        self._meter.show_state(status)
        self._say(status)
        try:
            self._consumer.state_changed(self.endpoint, self.source.dp_rank, status)
        except Exception:  # a consumer's mistake must not end the stream
            log.exception("[kvcache] KV events of %s/%d: state not taken", self.endpoint, self.source.dp_rank)

    def _say(self, status: StreamStatus) -> None:
        """Trouble is a warning as it begins, and not again until it is over; retries in vain are no news."""
        if status == self._said or (self._in_trouble and status.reason is StreamReason.SYNCHRONISING):
            return
        self._said = status
        begins = status.troubled and not self._in_trouble
        if status.troubled or status.state is StreamState.EXACT:
            self._in_trouble = status.troubled
        log.log(
            logging.WARNING if begins else logging.INFO,
            "[kvcache] KV events of %s/%d: %s (%s)%s",
            self.endpoint,
            self.source.dp_rank,
            status.state,
            status.reason,
            ": routed requests count until they are complete again" if begins else "",
        )
