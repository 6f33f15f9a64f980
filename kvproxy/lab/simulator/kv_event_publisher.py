"""Publishes a simulated engine's cache events over ZMQ as vLLM does: PUB for the stream, ROUTER for replays.

Payloads are written in the encodings of several vLLM versions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

if TYPE_CHECKING:
    import zmq.asyncio

#: End of a replay: a sequence number of -1 and an empty payload.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class EventEncoding(StrEnum):
    """Named after the first vLLM version that writes it so."""

    V0_11 = "0.11"  # arrays; replies to a replay have no topic frame
    V0_22 = "0.22"  # arrays with LoRA name, extra keys, group, kind
    V0_24 = "0.24"  # maps of the same fields
    V0_28 = "0.28"  # maps; replies to a replay have a topic frame

    @property
    def replay_has_topic(self) -> bool:
        """True if a reply to a replay request names the topic."""
        return self is EventEncoding.V0_28


class EventEncoder:
    """Turns one step's events into a message payload, as vLLM does. `bytes_hashes` writes hashes as 16 bytes instead of
    integers."""

    def __init__(
        self, *, block_size: int, encoding: EventEncoding = EventEncoding.V0_28, bytes_hashes: bool = False
    ) -> None:
        self._block_size = block_size
        self._bytes_hashes = bytes_hashes
        self._encoder = msgspec.msgpack.Encoder()
        self.write: Callable[[dict[str, Any]], Any] = {
            EventEncoding.V0_11: self._short_array,
            EventEncoding.V0_22: self._long_array,
        }.get(encoding, lambda event: event)

    def encode_payload(self, events: Sequence[KvEvent], *, ts: float, rank: int = 0) -> bytes:
        """Return the msgpack batch; `ts` is wall-clock seconds, `rank` the data-parallel rank."""
        return self._encoder.encode([ts, [self.write(each) for each in self.list_fields(events)], rank])

    def _hash(self, block_hash: int) -> int | bytes:
        return block_hash.to_bytes(16, "big") if self._bytes_hashes else block_hash

    def list_fields(self, events: Sequence[KvEvent]) -> Iterator[dict[str, Any]]:
        """Encode events; blocks that leave a lower tier together are one event, as LMCache sends it, while vLLM sends
        one for each block."""
        for medium, several in groupby(events, key=_left_tier):
            if medium is None:
                yield from map(self._map, several)
            else:
                hashes = [self._hash(event.block_hash) for event in several if isinstance(event, BlockRemoved)]
                yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}

    def _map(self, event: KvEvent) -> dict[str, Any]:
        if isinstance(event, AllBlocksCleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(event, BlockRemoved):
            hashes = [self._hash(event.block_hash)]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium, "group_idx": event.group}
        return self._stored(event)

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        """Of lower tiers without the fields that are vLLM's own."""
        fields = {
            "type": "BlockStored",
            "block_hashes": [self._hash(block_hash) for block_hash in event.block_hashes],
            "parent_block_hash": None if event.parent is None else self._hash(event.parent),
            "token_ids": event.token_ids,
            "block_size": self._block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
        }
        if event.medium != "GPU" and not any(event.extra_keys):
            return fields
        own = {"extra_keys": event.extra_keys, "group_idx": event.group, "kv_cache_spec_kind": event.kind}
        return fields | own

    def _short_array(self, event: dict[str, Any]) -> list[Any]:
        new_since = ("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind")
        return [value for name, value in event.items() if name not in new_since]

    def _long_array(self, event: dict[str, Any]) -> list[Any]:
        window = [None] if "kv_cache_spec_kind" in event else []
        return [*event.values(), *window]


def _left_tier(event: KvEvent) -> str | None:
    """Return the medium of the lower tier that a block left."""
    return event.medium if isinstance(event, BlockRemoved) and event.medium != "GPU" else None


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Settings of the event sockets; port 0 picks a free one. `buffer_steps` batches can be replayed. With
    `device_only` events of tiers below engine memory are not published."""

    host: str = "127.0.0.1"
    port: int = 0
    replay_port: int = 0
    topic: str = "kv-events"
    encoding: EventEncoding = EventEncoding.V0_28
    bytes_hashes: bool = False
    buffer_steps: int = 10_000
    hwm: int = 100_000
    rank: int = 0
    device_only: bool = False


class KvEventPublisher:
    """An async context manager. `lose_next` batches are numbered and kept for replay but not sent; `repeat_next`
    are sent twice: what a subscriber must survive."""

    def __init__(
        self,
        settings: PublisherSettings,
        *,
        encoder: EventEncoder,
        wall_clock: Callable[[], float],
        replay: bool = True,
    ) -> None:
        self.settings = settings
        self.lose_next = 0
        self.repeat_next = 0
        self._encoder = encoder
        self._wall_clock = wall_clock
        self._with_replay = replay
        self._topic = settings.topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._next_seq = 0
        self._task: asyncio.Task[None] | None = None
        self.endpoint = ""
        self.replay_endpoint: str | None = None

    async def __aenter__(self) -> KvEventPublisher:
        zmq = _import_zmq()
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set(zmq.SNDHWM, self.settings.hwm)
        self.endpoint = self._bind(self._pub, self.settings.port)
        if self._with_replay:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay_endpoint = self._bind(self._router, self.settings.replay_port)
            self._task = asyncio.create_task(self._serve_replays(), name="kv event replays")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._context.destroy(linger=0)

    @property
    def published(self) -> int:
        """Batches numbered so far."""
        return self._next_seq

    async def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one step's events as one batch."""
        if self.settings.device_only:
            events = [each for each in events if isinstance(each, AllBlocksCleared) or each.medium == "GPU"]
            if not events:
                return
        seq = self._next_seq.to_bytes(8, "big")
        self._next_seq += 1
        payload = self._encoder.encode_payload(events, ts=self._wall_clock(), rank=self.settings.rank)
        self._buffer.append((seq, payload))
        if self.lose_next > 0:
            self.lose_next -= 1
            return
        times = 1
        if self.repeat_next > 0:
            self.repeat_next -= 1
            times = 2
        for _ in range(times):
            await self._pub.send_multipart([self._topic, seq, payload])

    def _bind(self, socket: zmq.asyncio.Socket, port: int) -> str:
        socket.linger = 0
        socket.bind(f"tcp://{self.settings.host}:{port or '*'}")
        address = socket.last_endpoint
        return address.decode() if isinstance(address, bytes) else str(address)

    async def _serve_replays(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                await self._replay(frames[0], int.from_bytes(frames[2], "big"))

    async def _replay(self, peer: bytes, start: int) -> None:
        topic = [self._topic] if self.settings.encoding.replay_has_topic else []
        for seq, payload in list(self._buffer):
            if int.from_bytes(seq, "big") >= start:
                await self._router.send_multipart([peer, b"", *topic, seq, payload])
        empty_topic = [b""] if topic else []
        await self._router.send_multipart([peer, b"", *empty_topic, END_OF_REPLAY, b""])


def _import_zmq() -> ModuleType:
    """Import pyzmq, which only simulated engines need. ConfigError if it is not installed."""
    try:
        import zmq.asyncio
    except ImportError as error:
        what = "simulated engines publish KV events by pyzmq, which is not installed"
        raise ConfigError([Problem("", what, "pip install 'kvproxy[simulator]'")]) from error
    return zmq
