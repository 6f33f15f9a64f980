"""The streams of one engine while a trial's prompts are computed there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvproxy.base.errors import BadResponse, ClientError
from kvproxy.base.types import Clock
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.cache.indexes.block_events import BlockStored
from kvproxy.features.kv_events.decoding import Skipped, decode_batch, sequence_number
from kvproxy.features.kv_events.sockets import Subscription, read_replay

#: Batches read while waiting for our prompt: a busy engine publishes others meanwhile.
_MAX_BATCHES = 5000


@dataclass(slots=True)
class StreamObservation:
    """Events that arrived over one stream."""

    source: KvEventSource
    connected: bool = False
    batches: int = 0
    encoding: str = ""  # `map` or `array`
    malformed: int = 0
    lag_s: float | None = None  # our wall clock minus the engine's, of the batch that came fastest
    mine: BlockStored | None = None  # an event about the prompt that was sent
    replays: bool | None = None  # None: the engine names no replay socket
    _skipped: Skipped = field(default_factory=dict)

    def record_batch(self, frames: Sequence[bytes], tokens: Sequence[int], *, now: float) -> None:
        """One message; `tokens` are the prompt's ids."""
        try:
            batch = decode_batch(frames)
        except BadResponse:
            self.malformed += 1
            return
        self.batches += 1
        self.lag_s = min(now - batch.ts, math.inf if self.lag_s is None else self.lag_s)
        self.encoding = batch.encoding or self.encoding
        for event in batch.events(self._skipped):
            if not isinstance(event, BlockStored) or (self.mine is not None and self.mine.indexable):
                continue
            if _is_part(event, tokens):  # a hybrid model's other groups send events beside that of full attention
                self.mine = event
        self.malformed += self._skipped.pop("malformed", 0)


class WatchedStreams:
    """Subscriptions to every data-parallel rank of one engine."""

    def __init__(self, sources: Sequence[KvEventSource], *, clock: Clock, wall_clock: Clock) -> None:
        self.observed = [StreamObservation(source) for source in sources]
        self._clock = clock
        self._wall_clock = wall_clock
        self._open: list[Subscription] = []

    @property
    def skew_s(self) -> float | None:
        """Offset of the engine's clock from ours, by the events about our prompt."""
        return next((-one.lag_s for one in self.observed if one.mine is not None and one.lag_s is not None), None)

    async def connect(self, *, within_s: float) -> None:
        """Subscribe; returns when every connection is up, or after `within_s`."""
        self._open = [Subscription(stream.source) for stream in self.observed]
        ends = self._clock() + within_s
        for stream, subscription in zip(self.observed, self._open, strict=True):
            while not stream.connected and (left_s := ends - self._clock()) > 0:
                await subscription.wait_for_news(left_s)
                stream.connected = any(subscription.take_connections())

    def close(self) -> None:
        """End the subscriptions."""
        for subscription in self._open:
            subscription.close()

    async def find_prompt(self, tokens: Sequence[int], *, within_s: float) -> bool:
        """Return once a stream had an event of this prompt, or after `within_s`; False if one that is connected had
        none."""
        ends = self._clock() + within_s
        while not self._found and (left_s := ends - self._clock()) > 0:
            for stream, subscription in zip(self.observed, self._open, strict=True):
                self._drain(stream, subscription, tokens)
            if not self._found:
                await self._open[0].wait_for_news(min(left_s, 0.05) if len(self._open) > 1 else left_s)
        return self._found or not any(stream.connected for stream in self.observed)

    async def ask_rest(self, *, within_s: float) -> None:
        """Test whether the replay sockets answer. The requested batch lies in the future, so the answer is its end
        alone."""
        for stream in self.observed:
            if stream.source.replay_endpoint is not None:
                stream.replays = await _replays(stream.source.replay_endpoint, within_s)

    @property
    def _found(self) -> bool:
        return any(stream.mine for stream in self.observed)

    def _drain(self, stream: StreamObservation, subscription: Subscription, tokens: Sequence[int]) -> None:
        subscription.take_connections()
        for _ in range(_MAX_BATCHES):
            frames = subscription.take_message()
            if frames is None:
                return
            stream.record_batch(frames, tokens, now=self._wall_clock())


async def _replays(address: str, within_s: float) -> bool:
    try:
        async with aclosing(read_replay(address, 1 << 62, idle_timeout_s=within_s)) as messages:
            async for frames in messages:
                if sequence_number(frames) is None:
                    return True
    except (ClientError, ValueError):
        return False
    return False


def _is_part(event: BlockStored, tokens: Sequence[int]) -> bool:
    """Return True if the event's blocks are blocks of this prompt."""
    size = event.block_tokens
    ids = list(event.token_ids)
    return bool(ids) and any(list(tokens[i : i + len(ids)]) == ids for i in range(0, len(tokens), size))
