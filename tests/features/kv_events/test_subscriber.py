"""The subscriber over real ZMQ sockets on loopback."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvproxy.base.errors import BadResponse, ClientTimeout
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.features.kv_events import sockets
from kvproxy.features.kv_events.subscriber import KvEventSubscriber
from tests.features.kv_events.support import Index, Publisher, captured_frames, frames, removed, stored
from tests.support.clock import FakeClock
from tests.support.until import until

A = EndpointId("a")


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def engine(context: zmq.asyncio.Context) -> AsyncIterator[Publisher]:
    async with Publisher(context) as publisher:
        yield publisher


@contextlib.asynccontextmanager
async def following(
    engine: Publisher, *, replay: bool = True, rank: int = 0, metrics: Metrics | None = None, **options: Any
) -> AsyncIterator[tuple[KvEventSubscriber, Index]]:
    """Yield a subscriber of `engine`, once its first synchronisation is over."""
    index = Index()
    source = KvEventSource(rank, engine.address, engine.replay_address if replay else None, "kv-events")
    settings = {"clock": FakeClock(), "wall_clock": lambda: 5000.0, "retry_s": 0.01, **options}
    subscriber = KvEventSubscriber(A, source, consumer=index, metrics=metrics or Metrics(), **settings)
    async with subscriber:
        await until(lambda: index.states[-1:] and not index.states[-1].startswith("connecting"))
        yield subscriber, index


async def test_a_late_subscriber_catches_up_and_follows(engine: Publisher) -> None:
    """History from the replay socket, then live batches; exact all the way."""
    for n in range(20):
        await engine.publish(stored(n))
    async with following(engine) as (subscriber, index):
        assert index.blocks == set(range(20))
        await engine.publish(removed(0), stored(20))
        await until(lambda: 20 in index.blocks)
        assert index.blocks == set(range(1, 21))
        assert index.states == ["connecting/synchronising", "exact/following"]
        assert subscriber.status.state == "exact"


@pytest.mark.parametrize("capture", ["oldfmt_0.11.0.jsonl", "oldfmt_0.22.1.jsonl", "oldfmt_0.24.0.jsonl"])
async def test_old_engines_replay_without_a_topic_frame(context: zmq.asyncio.Context, capture: str) -> None:
    """Their captured payloads, live and replayed, in their own framing."""
    payloads = [message[-1] for message in captured_frames(capture)]
    async with Publisher(context, topic_frame=False) as engine:
        for seq, payload in enumerate(payloads):
            engine.history.append((seq, [b"kv-events", seq.to_bytes(8, "big"), payload]))
        async with following(engine) as (_, index):
            assert index.blocks
            assert index.states[-1] == "exact/following"
            number = len(payloads)
            await engine.send([b"kv-events", number.to_bytes(8, "big"), payloads[0]])
            await until(lambda: len(index.slices) > len(payloads))


async def test_lost_batches_are_fetched(engine: Publisher) -> None:
    """A gap in the numbers asks the replay socket for what is missing."""
    async with following(engine) as (_, index):
        await engine.publish(stored(1))
        await until(lambda: 1 in index.blocks)
        for n in (2, 3, 4):
            engine.batch(stored(n))
        await engine.publish(stored(5))
        await until(lambda: 5 in index.blocks)
        assert index.blocks == {1, 2, 3, 4, 5}
        assert index.states[-1] == "exact/following"


async def test_an_engine_that_restarts(engine: Publisher) -> None:
    """Disconnected is said at once; after the reconnection only the new process' blocks count."""
    async with following(engine) as (_, index):
        await engine.publish(stored(1))
        await engine.publish(stored(2))
        await until(lambda: 2 in index.blocks)
        await engine.restart()
        await until(lambda: "degraded/disconnected" in index.states)
        await until(lambda: index.states[-1] == "exact/following")
        assert index.blocks == set()
        await engine.publish(stored(3))
        await until(lambda: index.blocks == {3})


async def test_a_cut_connection_to_the_same_process(engine: Publisher) -> None:
    """Batches published meanwhile are there after the reconnection, and nothing was wiped."""
    async with following(engine) as (_, index):
        await engine.publish(stored(1))
        await until(lambda: 1 in index.blocks)
        wipes = index.wipes
        await engine.stop()
        await until(lambda: "degraded/disconnected" in index.states)
        engine.batch(stored(2))
        await engine.start()
        await until(lambda: index.blocks == {1, 2})
        await until(lambda: index.states[-1] == "exact/following")
        assert index.wipes == wipes


async def test_a_replay_that_does_not_answer_is_retried(engine: Publisher) -> None:
    """Degraded meanwhile, exact as soon as the engine answers."""
    await engine.publish(stored(1))
    engine.mute = True
    clock = FakeClock()
    async with following(engine, replay_timeout_s=0.02, clock=clock) as (_, index):
        assert index.states[-1] == "degraded/replay_failed"
        engine.mute = False

        def retried() -> bool:
            clock.advance(60.0)
            return index.states[-1] == "exact/following"

        await until(retried)
        assert index.blocks == {1}


async def test_retries_slow_down(engine: Publisher) -> None:
    """Each failed replay doubles the pause before the next; live batches do not hasten it."""
    engine.mute = True
    clock = FakeClock()
    async with following(engine, replay_timeout_s=0.3, clock=clock, retry_s=1.0) as (_, index):
        for pause_s in (1.0, 2.0, 4.0):
            asked, wipes, seen = len(engine.replays), index.wipes, len(index.slices)
            clock.advance(pause_s - 0.1)
            await engine.publish(stored(1))
            await until(lambda seen=seen: len(index.slices) > seen)  # type: ignore[misc]
            assert len(engine.replays) == asked
            clock.advance(0.1)
            await engine.publish(stored(1))
            await until(lambda wipes=wipes: index.wipes == wipes + 2)  # type: ignore[misc]
            await until(lambda asked=asked: len(engine.replays) > asked)  # type: ignore[misc]
            assert len(engine.replays) == asked + 1


async def test_an_engine_without_replay(engine: Publisher) -> None:
    """Followed from where we came in, and said so."""
    async with following(engine, replay=False) as (_, index):
        assert index.states[-1] == "degraded/no_replay"
        await engine.wait_for_subscription()
        await engine.publish(stored(1))
        await until(lambda: index.states[-1] == "exact/following")


async def test_other_topics_are_not_ours(engine: Publisher) -> None:
    """A publisher may carry more than one."""
    async with following(engine) as (_, index):
        await engine.send(frames(0, stored(7), topic=b"other"))
        await engine.publish(stored(1))
        await until(lambda: index.blocks == {1})


async def test_a_message_of_many_frames_ends_the_connection(engine: Publisher) -> None:
    """No engine sends such a one; what follows is read over the next connection, the history included."""
    async with following(engine) as (_, index):
        await until(lambda: index.states[-1:] == ["exact/following"])
        await engine.send([b"kv-events"] * 2000)
        await until(lambda: "degraded/disconnected" in index.states)
        await engine.publish(stored(1))
        await until(lambda: index.blocks == {1})


async def test_a_consumer_that_raises_gets_its_index_rebuilt(
    engine: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged and shown; the stream starts over and ends exact."""
    async with following(engine) as (_, index):
        await engine.publish(stored(1))
        await until(lambda: 1 in index.blocks)
        index.fails = 1
        await engine.publish(stored(2))
        await until(lambda: "degraded/failed" in index.states)
        await until(lambda: index.states[-1] == "exact/following")
        assert index.blocks == {1, 2}
    assert "starting over" in caplog.text


async def test_a_stream_in_trouble_is_a_warning_once(engine: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    """With what it means; on the way back, and when all is healthy again, it is information."""
    caplog.set_level(logging.INFO, "kvproxy.features.kv_events")
    clock = FakeClock()
    async with following(engine, clock=clock) as (subscriber, index):
        assert subscriber.troubled_s is None
        await engine.stop()
        await until(lambda: "degraded/disconnected" in index.states)
        clock.advance(7.0)
        assert subscriber.troubled_s == 7.0
        await engine.start()
        await until(lambda: index.states[-1] == "exact/following")
        assert subscriber.troubled_s is None
    lines = [record for record in caplog.records if "KV events of a/0" in record.getMessage()]
    (warning,) = [record for record in lines if record.levelname == "WARNING"]
    assert "degraded (disconnected): routed requests count" in warning.getMessage()
    assert (lines[-1].levelname, lines[-1].getMessage()) == ("INFO", "[kvcache] KV events of a/0: exact (following)")


async def test_retries_in_vain_are_logged_once(engine: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    """However often a replay is requested that does not come."""
    caplog.set_level(logging.INFO, "kvproxy.features.kv_events")
    engine.mute = True
    await engine.publish(stored(1))
    async with following(engine, replay_timeout_s=0.02, clock=time.monotonic) as (_, index):
        await until(lambda: index.states.count("degraded/replay_failed") >= 3)
    lines = [record.getMessage() for record in caplog.records if "KV events of a/0" in record.getMessage()]
    assert ["replay_failed" in line for line in lines] == [False, True]


async def test_a_consumer_that_will_not_hear_the_state(engine: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    """Its mistake is logged and ends nothing."""

    class Deaf(Index):
        def state_changed(self, *args: Any) -> None:
            raise RuntimeError("deaf")

    index = Deaf()
    source = KvEventSource(0, engine.address, engine.replay_address)
    subscriber = KvEventSubscriber(
        A, source, consumer=index, metrics=Metrics(), clock=FakeClock(), wall_clock=FakeClock()
    )
    await engine.publish(stored(1))
    async with subscriber:
        await until(lambda: index.blocks == {1})
    assert "state not taken" in caplog.text


async def test_an_address_that_is_none(context: zmq.asyncio.Context, caplog: pytest.LogCaptureFixture) -> None:
    """Said and retried; leaving ends it."""
    index = Index()
    subscriber = KvEventSubscriber(
        A,
        KvEventSource(0, "tcp://nonsense"),
        consumer=index,
        metrics=Metrics(),
        clock=FakeClock(),
        wall_clock=FakeClock(),
        retry_s=0.001,
    )
    async with subscriber:
        await until(lambda: caplog.text.count("starting over") >= 2)
    assert index.states == ["degraded/failed"]


async def test_pauses_grow_until_a_stream_has_run_for_long(engine: Publisher) -> None:
    """Each start that soon fails doubles the pause before the next, up to half a minute; after a good run it is short
    again."""
    clock, pauses = FakeClock(), list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async with following(engine, clock=clock, retry_s=1.0, sleep=sleep) as (_, index):

        async def fail() -> None:
            index.fails, before = 1, len(pauses)
            await engine.publish(stored(1))
            await until(lambda: len(pauses) > before and index.states[-1] == "exact/following")

        for _ in range(6):
            await fail()
        clock.advance(31.0)
        await fail()
        await fail()
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 1.0, 2.0]


async def test_silence_is_noticed(engine: Publisher) -> None:
    """An engine that prefills and publishes nothing is not believed to be empty."""
    clock = FakeClock()
    async with following(engine, clock=clock) as (subscriber, index):
        subscriber.note_traffic(10_000)
        clock.advance(31.0)
        subscriber.note_traffic(10_000)
        assert index.states[-1] == "approximate/silent"
        await engine.publish(stored(1))
        await until(lambda: index.states[-1] == "exact/following")


async def test_metrics_of_a_stream(engine: Publisher) -> None:
    """Batches, blocks, lag and state; gauges go with the stream."""
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    await engine.publish(stored(1, 2))
    async with following(engine, rank=1, metrics=metrics) as (_, index):
        await engine.publish(removed(1))
        await until(lambda: index.blocks == {2})
        assert value("kvproxy_kv_event_blocks_total", {"endpoint": "a", "kind": "stored"}) == 2
        assert value("kvproxy_kv_event_blocks_total", {"endpoint": "a", "kind": "removed"}) == 1
        assert value("kvproxy_kv_event_lag_seconds", {"endpoint": "a", "rank": "1"}) == 5000.0 - 1000.5
        state = {"endpoint": "a", "rank": "1", "state": "exact"}
        assert value("kvproxy_kv_event_stream_state", state) == 1
    assert value("kvproxy_kv_event_stream_state", state) is None
    assert value("kvproxy_kv_event_batches_total", {"endpoint": "a", "outcome": "replayed"}) == 1


async def test_a_burst_does_not_starve_the_loop(engine: Publisher) -> None:
    """While 40 000 blocks arrive another task gets its turn after every slice."""
    turns = 0
    at_slice: list[int] = []

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with following(engine, slice_blocks=200) as (_, index):
        applied = index.apply
        index.apply = lambda *args: (at_slice.append(turns), applied(*args))  # type: ignore[method-assign, assignment, func-returns-value]
        task = asyncio.create_task(other())
        for n in range(40):
            await engine.publish(*(stored(*range(n * 1000 + k, n * 1000 + k + 100)) for k in range(0, 1000, 100)))
        await until(lambda: len(index.blocks) == 40_000)
        task.cancel()
        await asyncio.wait([task])
        assert len(at_slice) >= 200
        assert max(collections.Counter(at_slice).values()) <= 2
        assert index.states[-1] == "exact/following"


async def test_a_replay_without_end_is_bounded(engine: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """More batches than any buffer holds are not a replay."""
    monkeypatch.setattr(sockets, "MAX_REPLAYED_BATCHES", 3)
    for n in range(5):
        engine.batch(stored(n))
    with pytest.raises(BadResponse, match="without end"):
        async for _ in sockets.read_replay(engine.replay_address, 0, idle_timeout_s=5):
            pass


async def test_a_silent_replay_times_out(engine: Publisher) -> None:
    """Its socket is closed with it."""
    engine.mute = True
    with pytest.raises(ClientTimeout):
        async for _ in sockets.read_replay(engine.replay_address, 0, idle_timeout_s=0.01):
            pass
