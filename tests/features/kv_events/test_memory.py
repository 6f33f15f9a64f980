"""Bytes that a stream of large batches can make the proxy hold, counted at both ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.features.kv_events import subscriber as subscriber_module
from kvproxy.features.kv_events.decoding import END_OF_REPLAY
from kvproxy.features.kv_events.sockets import AHEAD_BYTES, Subscription, read_replay
from kvproxy.features.kv_events.subscriber import KvEventSubscriber
from kvproxy.features.kv_events.zmtp import ReceiveMemory
from tests.features.kv_events.support import Index, Publisher, frames, stored
from tests.support.clock import FakeClock
from tests.support.until import until

A = EndpointId("a")
BATCH_BYTES = 2 << 20

#: Besides what is received and not taken:
#: one batch being read, one being written, and the buffers of the kernel, about 10 MB.
ELSEWHERE = 12

#: What one read of a socket brings at most.
READ_BYTES = 256 * 1024


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def padding(size: int) -> dict[str, Any]:
    """Return an event of a type that is passed over."""
    return {"type": "Padding", "data": "x" * size}


def stalled_after(socket: zmq.Socket[bytes], message: list[bytes], attempts: int) -> int:
    """So many of `attempts` messages went out before the other end took no more."""
    for sent in range(attempts):
        try:
            socket.send_multipart(message)
        except zmq.Again:
            return sent
    return attempts


def sending(context: zmq.asyncio.Context, kind: int) -> tuple[zmq.Socket[bytes], str]:
    """Return a plain socket whose sends fail when nothing is taken for a while, instead of being dropped; and its
    address."""
    socket: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 1)
    socket.setsockopt(zmq.SNDTIMEO, 1000)
    socket.setsockopt(zmq.XPUB_NODROP if kind == zmq.XPUB else zmq.ROUTER_MANDATORY, 1)
    socket.bind("tcp://127.0.0.1:0")
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


async def test_a_stream_that_is_not_read_holds_few_batches(context: zmq.asyncio.Context) -> None:
    """The engine cannot make us hold more than a few of its batches; they wait at its own end."""
    engine, address = sending(context, zmq.XPUB)
    subscription = Subscription(KvEventSource(0, address))
    with contextlib.closing(subscription), engine:
        await asyncio.to_thread(engine.recv)  # the subscription
        message = frames(0, padding(BATCH_BYTES))
        sent = await asyncio.to_thread(stalled_after, engine, message, 60)
        assert 1 <= sent <= AHEAD_BYTES // BATCH_BYTES + 1 + ELSEWHERE


async def test_a_replay_that_is_not_read_holds_few_batches(context: zmq.asyncio.Context) -> None:
    """As a live stream; what was read ahead is counted besides."""
    engine, address = sending(context, zmq.ROUTER)
    memory = ReceiveMemory(limit_bytes=4 * BATCH_BYTES)
    messages = read_replay(address, 0, idle_timeout_s=60, memory=memory)
    with engine:
        first = asyncio.create_task(anext(messages))
        peer = (await asyncio.to_thread(engine.recv_multipart))[0]
        message = [peer, b"", *frames(0, padding(BATCH_BYTES))]
        sent = await asyncio.to_thread(stalled_after, engine, message, 60)
        assert (await first)[-1] == message[-1]
        assert sent <= 4 + 1 + ELSEWHERE
        await messages.aclose()
        assert memory.held_bytes == 0


async def test_replays_read_ahead_within_their_share(context: zmq.asyncio.Context) -> None:
    """Two streams together stay below the bound, a message and a read each; all arrives in order."""
    size = 100_000
    memory = ReceiveMemory(limit_bytes=10 * size, connection_bytes=8 * size)
    async with Publisher(context) as engine:
        for _ in range(40):
            engine.batch(padding(size))

        most = 0

        async def read() -> list[bytes]:
            nonlocal most
            found = []
            async for message in read_replay(engine.replay_address, 0, idle_timeout_s=60, memory=memory):
                most = max(most, memory.held_bytes)
                found.append(message[-2])
                await asyncio.sleep(0)
            return found

        both = await asyncio.gather(read(), read())
    expected = [*(number.to_bytes(8, "big") for number in range(40)), END_OF_REPLAY]
    assert both == [expected, expected]
    assert size < most <= 10 * size + 2 * (size + 1000 + READ_BYTES)
    assert memory.held_bytes == 0


async def test_large_batches_are_followed_without_a_gap(context: zmq.asyncio.Context) -> None:
    """They wait for their turn at the engine, and none is lost."""
    metrics = Metrics()
    index = Index()
    async with Publisher(context) as engine:
        source = KvEventSource(0, engine.address, engine.replay_address, "kv-events")
        async with KvEventSubscriber(
            A, source, consumer=index, metrics=metrics, clock=FakeClock(), wall_clock=FakeClock()
        ):
            await until(lambda: index.states[-1:] == ["exact/following"])
            for number in range(40):
                await engine.publish(stored(number), padding(BATCH_BYTES))
            await until(lambda: index.blocks == set(range(40)))
            await until(lambda: index.states[-1] == "exact/following")
        assert len(engine.replays) == 1
    gaps = [metrics.registry.get_sample_value("kvproxy_kv_event_gaps_total", {"endpoint": "a", "outcome": outcome})
            for outcome in ("filled", "lost", "restart")]  # fmt: skip
    assert gaps == [None] * 3


class Unread:
    """A subscription with `waiting` batches that came already."""

    def __init__(self, waiting: list[list[bytes]]) -> None:
        self._waiting = waiting
        self._up = [True]
        self.arrived = asyncio.Event()

    async def wait_for_news(self, timeout_s: float | None) -> None:
        if not self._up and not self._waiting:
            await self.arrived.wait()
            self.arrived.clear()

    def take_connections(self) -> list[bool]:
        changes, self._up = self._up, []
        return changes

    def take_message(self) -> list[bytes] | None:
        return self._waiting.pop(0) if self._waiting else None

    def close(self) -> None:
        pass


async def test_a_stream_that_is_behind_says_so(context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Degraded once so many bytes came in one go, and counted; exact as soon as all of them were applied."""
    monkeypatch.setattr(subscriber_module, "BEHIND_BYTES", 3000)
    batches = [frames(number, stored(number), padding(900)) for number in range(10)]
    subscription = Unread(batches[:2])
    monkeypatch.setattr(subscriber_module, "Subscription", lambda *_: subscription)
    metrics, index = Metrics(), Index()

    def times() -> float | None:
        return metrics.registry.get_sample_value("kvproxy_kv_event_behind_total", {"endpoint": "a"})

    async with KvEventSubscriber(
        A, KvEventSource(0, "tcp://127.0.0.1:1"), consumer=index, metrics=metrics,
        clock=FakeClock(), wall_clock=FakeClock(),
    ):  # fmt: skip
        await until(lambda: index.blocks == {0, 1})
        assert index.states[-1] == "exact/following"
        assert times() == 0
        seen = len(index.states)
        subscription._waiting.extend(batches[2:])
        subscription.arrived.set()
        await until(lambda: index.blocks == set(range(10)))
        await until(lambda: len(index.states) == seen + 2)
        assert index.states[seen:] == ["degraded/behind", "exact/following"]
        assert times() == 1


async def test_a_stream_that_does_not_catch_up_for_long_is_behind(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes it brought: each batch takes two seconds here."""
    clock, index = FakeClock(), Index()
    apply = index.apply

    def slowly(*args: Any) -> None:
        clock.advance(2.0)
        apply(*args)

    index.apply = slowly  # type: ignore[method-assign]
    subscription = Unread([frames(number, stored(number)) for number in range(5)])
    monkeypatch.setattr(subscriber_module, "Subscription", lambda *_: subscription)
    async with KvEventSubscriber(
        A, KvEventSource(0, "tcp://127.0.0.1:1"), consumer=index, metrics=Metrics(),
        clock=clock, wall_clock=FakeClock(),
    ):  # fmt: skip
        await until(lambda: index.blocks == set(range(5)))
        await until(lambda: index.states[-1] == "exact/following")
        assert index.states[-2] == "degraded/behind"


def test_padding_is_passed_over() -> None:
    """The batches of these tests are readable ones."""
    assert msgspec.msgpack.decode(frames(0, padding(3))[-1])[1] == [{"type": "Padding", "data": "xxx"}]
