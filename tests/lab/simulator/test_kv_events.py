"""Cache events on the wire, against what a real vLLM sent."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

import kvproxy
from kvproxy.base.errors import ConfigError
from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvproxy.lab.simulator.kv_event_publisher import EventEncoder, EventEncoding, KvEventPublisher, PublisherSettings
from tests.lab.simulator.support import FIXTURES, Running, engine, shape

EVENTS = FIXTURES / "vllm_events"
ENCODINGS = {
    "mini_fixture": EventEncoding.V0_28,
    "oldfmt_0.11.0": EventEncoding.V0_11,
    "oldfmt_0.22.1": EventEncoding.V0_22,
    "oldfmt_0.24.0": EventEncoding.V0_24,
}


def captured(name: str) -> list[bytes]:
    """Payloads of one capture."""
    lines = (EVENTS / f"{name}.jsonl").read_text().splitlines()
    return [bytes.fromhex(json.loads(line)["frames_hex"][-1]) for line in lines]


def read_event(event: Any) -> tuple[KvEvent, int]:
    """Return a captured event as ours, with its block size (0 where it names none)."""
    if isinstance(event, list):
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
        names += ("lora_id", "medium", "lora_name", "extra_keys")
        event = dict(zip(names, event, strict=False))
    if event["type"] == "AllBlocksCleared":
        return AllBlocksCleared(), 0
    if event["type"] == "BlockRemoved":
        return BlockRemoved(event["block_hashes"][0]), 0
    extra = tuple(None if keys is None else tuple(keys) for keys in event.get("extra_keys", ()))
    hashes, parent = tuple(event["block_hashes"]), event["parent_block_hash"]
    stored = BlockStored(hashes, parent, tuple(event["token_ids"]), event["lora_id"], event.get("lora_name"), extra)
    return stored, event["block_size"]


def has_bytes_hashes(events: list[Any]) -> bool:
    """Whether a captured batch names its blocks by digests."""
    last = events[-1]
    return isinstance((last["block_hashes"] if isinstance(last, dict) else last[1])[0], bytes)


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_same_bytes_as_vllm(name: str) -> None:
    """Every captured batch, encoded again by us: byte for byte the same, in each version's encoding."""
    compared = 0
    for raw in captured(name):
        ts, events, rank = msgspec.msgpack.decode(raw)
        if has_bytes_hashes(events):
            continue
        pairs = [read_event(event) for event in events]
        size = max(size for _, size in pairs)
        encoder = EventEncoder(block_size=size, encoding=ENCODINGS[name])
        assert encoder.encode_payload([event for event, _ in pairs], ts=ts, rank=rank) == raw
        compared += 1
    assert compared >= 4


def test_a_lower_tiers_events_are_those_of_lmcache() -> None:
    """As captured from its server 0.5.6 in vLLM's stream: without vLLM's own fields, and one event for all blocks that
    leave together."""
    tokens = tuple(range(256))
    events = [
        BlockStored((11,), None, tokens, extra_keys=(None,), medium="CPU"),
        *(BlockRemoved(block, medium="CPU") for block in (1, 2)),
        BlockRemoved(3),
    ]
    payload = EventEncoder(block_size=256).encode_payload(events, ts=1.0)
    stored, removed, of_vllm = msgspec.msgpack.decode(payload)[1]
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [11],
        "parent_block_hash": None,
        "token_ids": list(tokens),
        "block_size": 256,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    assert removed == {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "CPU"}
    assert of_vllm == {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU", "group_idx": 0}


def test_hashes_as_bytes() -> None:
    """The shape of a batch whose blocks are named by 16-byte digests."""
    raw = next(raw for raw in captured("mini_fixture") if has_bytes_hashes(msgspec.msgpack.decode(raw)[1]))
    _ts, events, _rank = msgspec.msgpack.decode(raw)
    stored = next(event for event in events if event["type"] == "BlockStored")
    ours = BlockStored((5,), 4, tuple(stored["token_ids"]), extra_keys=(None,))
    encoder = EventEncoder(block_size=stored["block_size"], bytes_hashes=True)
    _ts, [mine], _rank = msgspec.msgpack.decode(encoder.encode_payload([ours], ts=1.0))
    assert {**shape(mine), "parent_block_hash": "x"} == {**shape(stored), "parent_block_hash": "x"}
    assert mine["parent_block_hash"] == (4).to_bytes(16, "big")
    assert len(stored["block_hashes"][0]) == len(mine["block_hashes"][0]) == 16


class Subscriber:
    """The router's side: a SUB socket and a DEALER for replays."""

    def __init__(self, sub: zmq.asyncio.Socket, dealer: zmq.asyncio.Socket) -> None:
        self.sub = sub
        self.dealer = dealer

    async def next_frames(self) -> list[bytes]:
        """One published message."""
        frames: list[bytes] = await self.sub.recv_multipart()
        return frames

    async def replay(self, start: int) -> list[list[bytes]]:
        """Every reply frame list up to the end marker, the empty frame included."""
        await self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        replies: list[list[bytes]] = []
        while not replies or replies[-1][-1] != b"":
            replies.append(await self.dealer.recv_multipart())
        return replies


@contextlib.asynccontextmanager
async def subscribed(publisher: KvEventPublisher) -> AsyncIterator[Subscriber]:
    """Yield a subscriber whose subscription has reached the publisher."""
    context = zmq.asyncio.Context()
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        sub.subscribe(b"kv-events")
        sub.connect(publisher.endpoint)
        if publisher.replay_endpoint is not None:
            dealer.connect(publisher.replay_endpoint)
        while not await sub.poll(5):
            await publisher.publish([AllBlocksCleared()])
        while await sub.poll(20):
            await sub.recv_multipart()
        yield Subscriber(sub, dealer)
    finally:
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publishing(**settings: Any) -> AsyncIterator[KvEventPublisher]:
    """Yield a publisher with a fixed wall clock."""
    given = PublisherSettings(**settings)
    encoder = EventEncoder(block_size=16, encoding=given.encoding, bytes_hashes=given.bytes_hashes)
    async with KvEventPublisher(given, encoder=encoder, wall_clock=lambda: 5.0) as publisher:
        yield publisher


async def test_three_frames_with_a_big_endian_number() -> None:
    """Topic, sequence number, payload; numbers rise by one."""
    async with publishing(rank=1) as publisher, subscribed(publisher) as subscriber:
        first = publisher.published
        await publisher.publish([BlockRemoved(7)])
        await publisher.publish([BlockRemoved(8)])
        messages = [await subscriber.next_frames() for _ in range(2)]
    assert [frames[0] for frames in messages] == [b"kv-events"] * 2
    assert [int.from_bytes(frames[1], "big") for frames in messages] == [first, first + 1]
    assert msgspec.msgpack.decode(messages[0][2])[::2] == [5.0, 1]


async def test_replay_as_captured() -> None:
    """[empty, topic, number, payload] for each batch from the asked one on, then the marker."""
    lines = [json.loads(line) for line in (EVENTS / "replay.jsonl").read_text().splitlines()]
    async with publishing() as publisher, subscribed(publisher) as subscriber:
        start = publisher.published
        for block_hash in (1, 2):
            await publisher.publish([BlockRemoved(block_hash)])
        replies = await subscriber.replay(start)
        assert await subscriber.replay(start + 100) == [replies[-1]]
    assert [len(reply) for reply in replies] == [4, 4, 4]
    assert [frame.hex() for frame in replies[-1]] == lines[-1]
    assert [frame.hex() for frame in replies[0][:2]] == lines[0][:2]
    assert int.from_bytes(replies[0][2], "big") == start


async def test_replay_of_older_versions_has_no_topic() -> None:
    """Before 0.28: [empty, number, payload]."""
    async with publishing(encoding=EventEncoding.V0_24) as publisher, subscribed(publisher) as subscriber:
        replies = await subscriber.replay(0)
    assert {len(reply) for reply in replies} == {3}


async def test_history_is_bounded() -> None:
    """Only the last `buffer_steps` batches come back."""
    async with publishing(buffer_steps=2) as publisher, subscribed(publisher) as subscriber:
        for block_hash in range(5):
            await publisher.publish([BlockRemoved(block_hash)])
        replies = await subscriber.replay(0)
        last = publisher.published - 1
    assert [int.from_bytes(reply[2], "big") for reply in replies[:-1]] == [last - 1, last]


async def test_a_replay_request_of_another_shape_is_ignored() -> None:
    """A stray message does not end the service."""
    async with publishing() as publisher, subscribed(publisher) as subscriber:
        await subscriber.dealer.send_multipart([b"", b"short"])
        assert (await subscriber.replay(10**6))[-1][-1] == b""


async def test_lost_and_repeated_batches() -> None:
    """A lost batch leaves a gap that replay heals; a repeated one comes twice under one number."""
    async with publishing() as publisher, subscribed(publisher) as subscriber:
        first = publisher.published
        publisher.lose_next = 1
        publisher.repeat_next = 1
        for block_hash in range(3):
            await publisher.publish([BlockRemoved(block_hash)])
        seen = [int.from_bytes((await subscriber.next_frames())[1], "big") for _ in range(3)]
        healed = await subscriber.replay(first)
    assert seen == [first + 1, first + 1, first + 2]
    assert int.from_bytes(healed[0][2], "big") == first


async def test_lower_tiers_may_be_kept_silent_about() -> None:
    """As by an engine whose connector publishes nothing: no batch is sent, or numbered, for them alone."""
    settings = PublisherSettings(device_only=True)
    encoder = EventEncoder(block_size=16)
    async with KvEventPublisher(settings, encoder=encoder, wall_clock=lambda: 1.0) as publisher:
        await publisher.publish([BlockRemoved(1, medium="CPU")])
        assert publisher.published == 0
        await publisher.publish([BlockRemoved(1, medium="CPU"), AllBlocksCleared()])
        assert publisher.published == 1


async def test_a_server_publishes_what_its_cache_does() -> None:
    """Ports through /kv_event_sources; store with token ids, then silence on a hit; faults lose batches."""
    async with engine(kv_events=PublisherSettings()) as running:
        publisher = running.app.state.publisher
        assert publisher is not None
        source = (await running.client.get("/kv_event_sources")).json()["0"]
        assert (source["endpoint"], source["replay_endpoint"]) == (publisher.endpoint, publisher.replay_endpoint)
        async with subscribed(publisher) as subscriber:
            ids = await _complete(running)
            _ts, events, _rank = msgspec.msgpack.decode((await subscriber.next_frames())[2])
            assert [event["type"] for event in events] == ["BlockStored"]
            assert events[0]["token_ids"] == ids[:96]
            assert events[0]["block_size"] == 32
            before = publisher.published
            await _complete(running)
            assert publisher.published == before
            await running.faults(lose_events=1)
            await _complete(running, cache_salt="other")
            assert publisher.published == before + 1
            assert not await subscriber.sub.poll(0)


async def test_a_server_without_events_says_so() -> None:
    """No source to discover."""
    async with engine() as running:
        assert (await running.client.get("/kv_event_sources")).json() == {}


async def test_a_publisher_without_replay() -> None:
    """`replay_endpoint` is optional in vLLM."""
    async with engine(kv_events=PublisherSettings(), kv_events_replay=False) as running:
        source = (await running.client.get("/kv_event_sources")).json()["0"]
    assert source["replay_endpoint"] is None


async def _complete(running: Running, **changes: Any) -> list[int]:
    ids = list(range(100, 200))
    body = {"prompt": ids, "max_tokens": 1, **changes}
    (await running.client.post("/v1/completions", json=body)).raise_for_status()
    return ids


async def test_without_pyzmq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy itself needs no pyzmq, so it may be missing where engines are simulated."""
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    publisher = KvEventPublisher(PublisherSettings(), encoder=EventEncoder(block_size=16), wall_clock=lambda: 1.0)
    with pytest.raises(ConfigError, match=r"pip install 'kvproxy\[simulator\]'"):
        await publisher.__aenter__()


def test_no_other_module_imports_pyzmq() -> None:
    """The required packages do not have it."""
    files = Path(kvproxy.__file__).parent.rglob("*.py")
    assert {path.name for path in files if "import zmq" in path.read_text()} == {"kv_event_publisher.py"}
