"""Captured and hand-made event frames, a publisher with replay, and a consumer that remembers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.block_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvproxy.features.kv_events.decoding import END_OF_REPLAY
from kvproxy.features.kv_events.status import StreamStatus
from tests.cache.clients.support import FIXTURES

BLOCK = 4
Event = dict[str, Any]


def captured_frames(name: str) -> list[list[bytes]]:
    """Messages of a capture, each as its frames."""
    rows = [json.loads(line) for line in (FIXTURES / "vllm_events" / name).read_text().splitlines()]
    return [[bytes.fromhex(frame) for frame in (row if isinstance(row, list) else row["frames_hex"])] for row in rows]


def captured_rows(name: str) -> list[dict[str, Any]]:
    """Return the same with the capture's own fields."""
    return [json.loads(line) for line in (FIXTURES / "vllm_events" / name).read_text().splitlines()]


def stored(*hashes: int, parent: int | None = None, **fields: Any) -> Event:
    """Return a BlockStored as 0.32 sends it; each block's tokens are its hash, four times."""
    tokens = [value for number in hashes for value in [number] * BLOCK]
    event = {"block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens, "block_size": BLOCK}
    return {"type": "BlockStored", **event, "medium": "GPU", **fields}


def removed(*hashes: int) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


CLEARED: Event = {"type": "AllBlocksCleared"}


def frames(seq: int, *events: Any, ts: float = 0.0, topic: bytes = b"kv-events") -> list[bytes]:
    """Return a message as published."""
    return [topic, seq.to_bytes(8, "big"), msgspec.msgpack.encode([ts, list(events), 0])]


class Index:
    """A consumer: the set of blocks a stream leaves behind, and everything it was told."""

    def __init__(self) -> None:
        self.blocks: set[int | bytes] = set()
        self.slices: list[list[KvEvent]] = []
        self.wipes = 0
        self.statuses: list[StreamStatus] = []
        self.fails = 0  # so many next calls raise

    def apply(self, endpoint: EndpointId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("index broken")
        self.slices.append(list(events))
        for event in events:
            if isinstance(event, BlockStored):
                self.blocks.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.blocks.difference_update(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()

    def cleared(self, endpoint: EndpointId, dp_rank: int) -> None:
        self.wipes += 1
        self.blocks.clear()

    def state_changed(self, endpoint: EndpointId, dp_rank: int, status: StreamStatus) -> None:
        self.statuses.append(status)

    @property
    def states(self) -> list[str]:
        """As `state/reason`."""
        return [f"{status.state}/{status.reason}" for status in self.statuses]


class Publisher:
    """An engine's event side: PUB with numbered batches, ROUTER that replays its buffer as vLLM does. An XPUB socket is
    a PUB socket that tells of its subscriptions."""

    def __init__(self, context: zmq.asyncio.Context, *, buffer_steps: int = 10_000, topic_frame: bool = True) -> None:
        self._context = context
        self._buffer_steps = buffer_steps
        self._topic_frame = topic_frame  # in replies: from 0.28 on
        self.history: list[tuple[int, list[bytes]]] = []
        self.seq = 0
        self.ts = 1000.0
        self.replays: list[int] = []  # start numbers asked for
        self.mute = False  # replay requests stay unanswered
        self.dropped: set[int] = set()  # left out of the next replay
        self.address = self.replay_address = ""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Publisher:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Binds: to free ports at first, to the same ones after a stop."""
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.address = await self._bind(self._pub, self.address)
        self.replay_address = await self._bind(self._router, self.replay_address)
        self._task = asyncio.create_task(self._serve(), name="publisher")

    async def stop(self) -> None:
        """As a process that ends."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        self._pub.close(linger=0)
        self._router.close(linger=0)

    async def restart(self) -> None:
        """Start a new process on the same ports: numbers from 0, an empty buffer."""
        await self.stop()
        self.history.clear()
        self.seq = 0
        self.ts += 100.0
        await self.start()

    def batch(self, *events: Any) -> list[bytes]:
        """Return a numbered batch in the buffer, not sent."""
        message = frames(self.seq, *events, ts=self.ts)
        self.history = [*self.history, (self.seq, message)][-self._buffer_steps :]
        self.seq += 1
        self.ts += 0.5
        return message

    async def wait_for_subscription(self) -> None:
        """Return when a subscription is in force: until then, what is published is dropped."""
        assert (await self._pub.recv()).startswith(b"\x01")

    async def publish(self, *events: Any) -> None:
        """Publish a numbered batch, and keep it."""
        await self._pub.send_multipart(self.batch(*events))

    async def send(self, message: list[bytes]) -> None:
        """Any frames at all."""
        await self._pub.send_multipart(message)

    async def _bind(self, socket: zmq.asyncio.Socket, address: str) -> str:
        """Binds; a port that was just closed is free a moment later."""
        async with asyncio.timeout(60):
            while True:
                try:
                    socket.bind(address or "tcp://127.0.0.1:0")
                except zmq.ZMQError as error:
                    if error.errno != zmq.EADDRINUSE:
                        raise
                    await asyncio.sleep(0.002)
                else:
                    return address or socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            if self.mute:
                continue
            dropped, self.dropped = self.dropped, set()
            for seq, message in list(self.history):
                if seq >= self.replays[-1] and seq not in dropped:
                    await self._router.send_multipart([client, b"", *message[0 if self._topic_frame else 1 :]])
            end = [b"", END_OF_REPLAY, b""] if self._topic_frame else [END_OF_REPLAY, b""]
            await self._router.send_multipart([client, b"", *end])
