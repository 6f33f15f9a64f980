"""Gaps, restarts and late starts, on a scripted engine without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.base.errors import ClientTimeout
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.features.kv_events.applier import StreamApplier
from kvproxy.features.kv_events.decoding import END_OF_REPLAY
from kvproxy.features.kv_events.follower import Replays, StreamFollower
from kvproxy.features.kv_events.status import StreamHealth, StreamMeter
from tests.features.kv_events.support import CLEARED, Index, frames, removed, stored
from tests.support.clock import FakeClock
from tests.support.examples import examples

A = EndpointId("a")


class Engine:
    """Batches an engine published, and its replay."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.first = 0  # oldest batch still in the buffer
        self.epoch = 0.0
        self.asked: list[int] = []
        self.timeouts = 0  # so many next replays stop in the middle
        self.holes: set[int] = set()  # missing from the next replay
        self.garbled: set[int] = set()

    def publish(self, *events: Any) -> list[bytes]:
        seq = len(self.batches)
        self.batches.append(frames(seq, *events, ts=self.epoch + seq))
        return self.batches[-1]

    def restart(self) -> None:
        self.batches.clear()
        self.epoch += 1000.0
        self.first = 0

    async def replay(self, start: int) -> AsyncGenerator[list[bytes], None]:
        self.asked.append(start)
        holes, self.holes = self.holes, set()
        batches = [*enumerate(self.batches)][max(start, self.first) :]
        if self.timeouts:
            self.timeouts -= 1
            for _, message in batches[: len(batches) // 2]:
                yield [b"", *message]
            raise ClientTimeout("kv events: replay silent")
        for seq, message in batches:
            if seq not in holes:
                yield [b"", *message[:-1], b"\xc1"] if seq in self.garbled else [b"", *message]
        yield [b"", b"", END_OF_REPLAY, b""]


class Stream:
    """A follower of `engine` with everything around it."""

    def __init__(self, engine: Engine, *, replay: bool = True, slice_blocks: int = 512) -> None:
        self.engine = engine
        self.index = Index()
        self.metrics = Metrics()
        self.pauses = 0
        self.health = StreamHealth(
            changed=lambda status: self.index.state_changed(A, 0, status),
            clock=FakeClock(),
            silence_s=30.0,
            block_tokens=128,
        )
        self.applier = StreamApplier(
            apply=lambda events: self.index.apply(A, 0, events),
            cleared=lambda: self.index.cleared(A, 0),
            health=self.health,
            meter=StreamMeter(self.metrics, A, 0, wall_clock=lambda: 1e9),
            pause=self._pause,
            slice_blocks=slice_blocks,
        )
        self.follower = StreamFollower(self.applier, replay=engine.replay if replay else None)

    @property
    def state(self) -> str:
        return f"{self.health.status.state}/{self.health.status.reason}"

    @property
    def blocks(self) -> set[int | bytes]:
        return self.index.blocks

    async def connect(self) -> None:
        self.health.mark_connected()
        await self.follower.synchronise()

    async def live(self, *events: Any) -> None:
        await self.follower.on_message(self.engine.publish(*events))

    def count(self, name: str, *labels: str) -> float:
        names = {"gaps": "kvproxy_kv_event_gaps_total", "batches": "kvproxy_kv_event_batches_total"}
        key = {"endpoint": "a", "outcome": labels[0]}
        return self.metrics.registry.get_sample_value(names[name], key) or 0.0

    async def _pause(self) -> None:
        self.pauses += 1
        await asyncio.sleep(0)


async def test_from_the_first_batch_on_everything_is_exact() -> None:
    """An engine that published nothing yet has nothing to miss."""
    stream = Stream(Engine())
    await stream.connect()
    assert stream.state == "exact/following"
    await stream.live(stored(1, 2))
    await stream.live(removed(1), stored(3, parent=2))
    assert stream.blocks == {2, 3}
    assert stream.engine.asked == [0]


async def test_a_late_start_replays_the_whole_history() -> None:
    """Then live batches continue where the replay ended; those it brought are duplicates."""
    engine = Engine()
    early = [engine.publish(stored(n)) for n in range(5)]
    stream = Stream(engine)
    await stream.connect()
    assert stream.blocks == set(range(5))
    await stream.follower.on_message(early[3])
    await stream.follower.on_message(early[4])
    await stream.live(stored(5))
    assert stream.blocks == set(range(6))
    assert stream.state == "exact/following"
    assert stream.count("batches", "duplicate") == 2
    assert stream.count("batches", "replayed") == 5


async def test_a_buffer_that_starts_later_is_partial_history() -> None:
    """Blocks whose events the engine has dropped may still be in its cache."""
    engine = Engine()
    for n in range(5):
        engine.publish(stored(n))
    engine.first = 2
    stream = Stream(engine)
    await stream.connect()
    assert stream.blocks == {2, 3, 4}
    assert stream.state == "degraded/partial_history"


async def test_a_clear_makes_partial_history_whole() -> None:
    """The missing blocks are gone from the engine as well; live or within the replay."""
    engine = Engine()
    for n in range(5):
        engine.publish(stored(n))
    engine.first = 2
    stream = Stream(engine)
    await stream.connect()
    await stream.live(CLEARED, stored(9))
    assert stream.state == "exact/following"
    assert stream.blocks == {9}
    other = Stream(engine)
    await other.connect()
    assert other.state == "exact/following"


async def test_a_gap_is_replayed() -> None:
    """From the batch applied last, which proves it is the same process; nothing is wiped."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    wipes = stream.index.wipes
    for n in (2, 3, 4):
        stream.engine.publish(stored(n))
    await stream.live(stored(5))
    assert stream.blocks == {1, 2, 3, 4, 5}
    assert stream.engine.asked == [0, 0]
    assert stream.index.wipes == wipes
    assert (stream.count("gaps", "filled"), stream.state) == (1, "exact/following")


async def test_a_batch_the_replay_did_not_bring_yet_is_taken_live() -> None:
    """The replay may be served before the batch that showed the gap is in its buffer."""
    stream = Stream(Engine())
    await stream.connect()
    stream.engine.publish(stored(1))
    stream.engine.publish(stored(2))
    await stream.follower.on_message(frames(2, stored(3), ts=2.0))
    assert stream.blocks == {1, 2, 3}


async def test_a_gap_the_buffer_has_forgotten_starts_over() -> None:
    """Missed removals would be believed for ever: everything is wiped and what is left replayed."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    for n in range(2, 8):
        stream.engine.publish(stored(n))
    stream.engine.first = 5
    await stream.live(stored(8))
    assert stream.blocks == {6, 7, 8}
    assert (stream.count("gaps", "lost"), stream.state) == (1, "degraded/partial_history")


async def test_numbers_that_fall_back_are_a_restart() -> None:
    """The old process' blocks are gone: wiped, and the new one's replayed."""
    stream = Stream(Engine())
    await stream.connect()
    for n in range(4):
        await stream.live(stored(n))
    stream.engine.restart()
    stream.engine.publish(stored(90))
    await stream.live(stored(91))
    assert stream.blocks == {90, 91}
    assert (stream.count("gaps", "restart"), stream.state) == (1, "exact/following")


async def test_a_restart_hidden_in_a_gap_is_seen_by_its_time_stamp() -> None:
    """The new process has published more than the old one: the numbers alone look like a gap."""
    stream = Stream(Engine())
    await stream.connect()
    for n in range(3):
        await stream.live(stored(n))
    stream.engine.restart()
    for n in range(90, 96):
        stream.engine.publish(stored(n))
    await stream.live(stored(96))
    assert stream.blocks == set(range(90, 97))
    assert stream.state == "exact/following"


async def test_a_reconnection_to_the_same_process_catches_up() -> None:
    """Nothing is wiped; what was published meanwhile is applied."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    wipes = stream.index.wipes
    stream.health.mark_disconnected()
    assert stream.state == "degraded/disconnected"
    stream.engine.publish(stored(2))
    await stream.connect()
    assert stream.blocks == {1, 2}
    assert (stream.index.wipes, stream.state) == (wipes, "exact/following")


@pytest.mark.parametrize("published", [0, 1, 2, 5])
async def test_a_reconnection_to_another_process_starts_over(published: int) -> None:
    """Whether it has published less, as much, or more than the old one."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    await stream.live(stored(2))
    stream.engine.restart()
    for n in range(published):
        stream.engine.publish(stored(90 + n))
    await stream.connect()
    assert stream.blocks == {90 + n for n in range(published)}
    assert stream.state == "exact/following"


@pytest.mark.parametrize("published", [0, 1, 2, 3, 9])
async def test_batches_a_gone_connection_left_do_no_harm(published: int) -> None:
    """They may pass for the new process' next ones; the synchronisation that follows takes them back."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(0))
    left = [stream.engine.publish(stored(60 + n)) for n in range(4)]
    stream.engine.restart()
    for n in range(published):
        stream.engine.publish(stored(90 + n))
    for message in left[1:]:
        await stream.follower.on_message(message)
    await stream.connect()
    assert stream.blocks == {90 + n for n in range(published)}
    # An empty replay beside batches from somewhere proves nothing; the new process' first batch does.
    assert stream.state == ("exact/following" if published else "degraded/partial_history")
    await stream.live(stored(50))
    assert stream.state == "exact/following"


async def test_a_hole_in_a_replay_is_asked_for_again() -> None:
    """A ROUTER drops what its peer cannot take: the replay goes on from there."""
    engine = Engine()
    for n in range(6):
        engine.publish(stored(n))
    engine.holes = {3}
    stream = Stream(engine)
    await stream.connect()
    assert stream.blocks == set(range(6))
    assert engine.asked == [0, 2]
    assert stream.state == "exact/following"


@pytest.mark.parametrize("end", [True, False], ids=["end comes", "end dropped"])
async def test_a_long_replay_comes_in_pieces(end: bool) -> None:
    """A ROUTER drops all that its queue cannot take, maybe the end as well: what came is kept, the rest asked for."""
    engine = Engine()
    for n in range(10_000):
        engine.publish(stored(n))
    stream = Stream(engine)
    taken: list[int] = []

    async def overflowing(start: int) -> AsyncGenerator[list[bytes], None]:
        messages = [message async for message in engine.replay(start)]
        for message in messages[:1000]:
            yield message
        if len(messages) > 1000:
            if not end:
                raise ClientTimeout("kv events: replay silent")
            for message in messages[-2:]:
                taken.append(len(messages))
                yield message

    stream.follower._replays = Replays(stream.applier, overflowing)
    await stream.connect()
    assert stream.blocks == set(range(10_000))
    assert stream.state == "exact/following"
    assert len(engine.asked) == 11
    assert len(taken) <= 11  # nothing is read beyond the hole


async def test_a_replay_with_holes_for_ever_is_given_up() -> None:
    """A bounded number of passes, then degraded and to be retried."""
    engine = Engine()
    for n in range(3):
        engine.publish(stored(n))

    class Holes(set[int]):
        def __contains__(self, seq: object) -> bool:
            return seq == 1

    stream = Stream(engine)
    replay = engine.replay

    async def broken(start: int) -> AsyncGenerator[list[bytes], None]:
        engine.holes = Holes()
        async for message in replay(start):
            yield message

    stream.follower._replays = Replays(stream.applier, broken)
    await stream.connect()
    assert len(engine.asked) == 5
    assert (stream.state, stream.applier.wants_retry, stream.blocks) == ("degraded/replay_failed", True, set())


async def test_a_replay_that_fails_is_not_half_believed() -> None:
    """Old stores without their later removals would be wrong: wiped, followed live, retried later."""
    engine = Engine()
    for n in range(4):
        engine.publish(stored(n))
    engine.timeouts = 1
    stream = Stream(engine)
    await stream.connect()
    assert (stream.state, stream.blocks) == ("degraded/replay_failed", set())
    await stream.live(stored(4))
    assert (stream.state, stream.blocks) == ("degraded/replay_failed", {4})
    assert stream.applier.wants_retry
    await stream.follower.synchronise()
    assert (stream.state, stream.blocks) == ("exact/following", set(range(5)))
    assert not stream.applier.wants_retry


async def test_a_clear_makes_a_retry_pointless() -> None:
    """After it the live stream alone is everything."""
    engine = Engine()
    engine.publish(stored(1))
    engine.timeouts = 1
    stream = Stream(engine)
    await stream.connect()
    await stream.live(CLEARED)
    assert (stream.applier.wants_retry, stream.state) == (False, "exact/following")


async def test_a_gap_while_replay_does_not_answer() -> None:
    """Wiped and followed from the batch at hand; the retry heals it."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    stream.engine.publish(stored(2))
    stream.engine.timeouts = 2
    await stream.live(stored(3))
    assert (stream.state, stream.blocks) == ("degraded/replay_failed", {3})
    await stream.follower.synchronise()
    assert (stream.state, stream.blocks) == ("exact/following", {1, 2, 3})


async def test_a_stream_that_starts_over_is_not_exact_meanwhile() -> None:
    """Its index lacks what the replay has not brought again, and what was cleared long ago is no news."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    stream.engine.restart()
    stream.index.statuses.clear()
    await stream.live(CLEARED)
    assert stream.index.states == ["connecting/synchronising", "exact/following"]


async def test_an_engine_without_replay_followed_from_its_start() -> None:
    """Batch 0 leaves nothing behind it."""
    stream = Stream(Engine(), replay=False)
    await stream.connect()
    assert stream.state == "degraded/no_replay"
    await stream.live(stored(1))
    assert (stream.state, stream.blocks) == ("exact/following", {1})
    stream.health.mark_disconnected()
    await stream.connect()
    assert stream.state == "exact/following"


async def test_an_engine_without_replay_joined_late() -> None:
    """Its past stays unknown until it clears its cache; gaps wipe what was known."""
    engine = Engine()
    engine.publish(stored(1))
    stream = Stream(engine, replay=False)
    await stream.connect()
    await stream.live(stored(2))
    assert (stream.state, stream.blocks) == ("degraded/no_replay", {2})
    engine.publish(stored(3))
    await stream.live(stored(4))
    assert (stream.state, stream.blocks) == ("degraded/lost_events", {4})
    await stream.live(CLEARED)
    assert stream.state == "exact/following"


@pytest.mark.parametrize(("missed", "state"), [(0, "exact/following"), (1, "degraded/lost_events")])
async def test_a_restart_without_replay(missed: int, state: str) -> None:
    """Exact again if the very first batch was seen."""
    stream = Stream(Engine(), replay=False)
    await stream.connect()
    for n in range(4):
        await stream.live(stored(n))
    stream.engine.restart()
    for _ in range(missed):
        stream.engine.publish(stored(80))
    await stream.live(stored(90))
    assert (stream.state, stream.blocks) == (state, {90})


async def test_a_batch_nobody_can_read_degrades() -> None:
    """It is passed over, the numbering goes on, and a reconnection does not pretend to know it."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    message = stream.engine.publish(stored(2))
    stream.engine.garbled = {1}
    await stream.follower.on_message([*message[:-1], b"\xc1"])
    await stream.live(stored(3))
    assert (stream.state, stream.blocks) == ("degraded/malformed", {1, 3})
    await stream.follower.on_message([b"nonsense"])
    assert stream.count("batches", "malformed") == 2
    await stream.connect()
    assert stream.state == "degraded/malformed"


async def test_an_unreadable_batch_in_a_replay() -> None:
    """The others are applied."""
    engine = Engine()
    for n in range(3):
        engine.publish(stored(n))
    engine.garbled = {1}
    stream = Stream(engine)
    await stream.connect()
    assert (stream.state, stream.blocks) == ("degraded/malformed", {0, 2})


async def test_a_malformed_event_degrades_an_unknown_one_does_not() -> None:
    """A new kind of event is no loss; a store that cannot be read is."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1), {"type": "BlockMoved"})
    assert stream.state == "exact/following"
    await stream.live(stored(2), {"type": "BlockStored"})
    assert (stream.state, stream.blocks) == ("degraded/malformed", {1, 2})
    value = stream.metrics.registry.get_sample_value
    assert value("kvproxy_kv_events_skipped_total", {"endpoint": "a", "reason": "malformed"}) == 1
    assert value("kvproxy_kv_events_skipped_total", {"endpoint": "a", "reason": "unknown_type"}) == 1


async def test_messages_before_the_first_synchronisation_cause_one() -> None:
    """A message can be seen before the news of the connection."""
    engine = Engine()
    engine.publish(stored(1))
    stream = Stream(engine)
    await stream.live(stored(2))
    assert stream.blocks == {1, 2}
    await stream.connect()
    assert stream.state == "exact/following"


async def test_forgetting_starts_over() -> None:
    """After a failure of the consumer its index is built again."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    stream.index.blocks.clear()
    stream.applier.forget()
    await stream.connect()
    assert stream.blocks == {1}


async def test_a_burst_is_applied_in_bounded_slices_with_pauses() -> None:
    """10 000 blocks in one batch: slices of 100, and others run between them."""
    stream = Stream(Engine(), slice_blocks=100)
    await stream.connect()
    await stream.live(*(stored(*range(n, n + 1000)) for n in range(0, 10_000, 1000)))
    assert max(sum(event.blocks for event in piece) for piece in stream.index.slices) == 100
    assert len(stream.blocks) == 10_000
    assert stream.pauses >= 100


async def test_many_tiny_batches_pause_as_well() -> None:
    """Their handling costs more than their blocks."""
    stream = Stream(Engine(), slice_blocks=100)
    await stream.connect()
    for n in range(100):
        await stream.live(stored(n))
    for message in stream.engine.batches[:0:-1]:
        await stream.follower.on_message(message)
    assert stream.pauses >= 8


Step = Callable[[Engine], None]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
async def test_whatever_is_lost_on_the_way_the_index_ends_right(data: st.DataObject) -> None:
    """Random stores, removals, clears, losses, holes, restarts: after one more live batch the index is the engine's."""
    engine = Engine()
    stream = Stream(engine, slice_blocks=2)
    truth: set[int] = set()
    await stream.connect()
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["store", "store", "remove", "clear", "restart", "lose", "hole"]))
        number = data.draw(st.integers(0, 6))
        if what == "restart":
            engine.restart()
            truth.clear()
            await stream.connect()
            continue
        event = {"remove": removed(number), "clear": CLEARED}.get(what, stored(number))
        if what == "clear":
            truth.clear()
        else:
            (truth.discard if what == "remove" else truth.add)(number)
        message = engine.publish(event)
        if what == "hole":
            engine.holes = {len(engine.batches) - 2}
        if what not in ("lose", "hole"):
            await stream.follower.on_message(message)
    truth.add(99)
    await stream.live(stored(99))
    assert (stream.blocks, stream.state) == (truth, "exact/following")


class Forgetful(Engine):
    """An engine whose replay buffer is always empty (`buffer_steps: 0`, or a relay between)."""

    async def replay(self, start: int) -> AsyncGenerator[list[bytes], None]:
        self.asked.append(start)
        yield [b"", b"", END_OF_REPLAY, b""]


async def joined_late() -> Stream:
    """Five hundred batches were published before."""
    stream = Stream(Forgetful())
    for n in range(500):
        stream.engine.publish(stored(n))
    await stream.connect()
    return stream


async def test_a_live_batch_beyond_an_empty_replay_is_partial_history() -> None:
    """An empty replay is no proof that nothing was published: the stream is joined where it is."""
    stream = await joined_late()
    for n in range(500, 700):
        await stream.live(stored(n))
    assert stream.blocks == set(range(500, 700))
    assert stream.state == "degraded/partial_history"
    assert len(stream.engine.asked) <= 3
    assert stream.count("gaps", "filled") == 0


async def test_after_a_reconnection_an_empty_replay_proves_nothing_either() -> None:
    """Until the first batch of a new process, which has nothing before it."""
    stream = await joined_late()
    await stream.live(stored(500))
    await stream.connect()
    assert (stream.blocks, stream.state) == (set(), "degraded/partial_history")
    await stream.live(stored(501))
    assert (stream.blocks, stream.state) == ({501}, "degraded/partial_history")
    stream.engine.restart()
    await stream.connect()
    await stream.live(stored(1))
    assert (stream.blocks, stream.state) == ({1}, "exact/following")


async def test_a_replay_that_ends_too_early_is_not_asked_again_for_each_batch() -> None:
    """Events that it leaves out are lost, and earlier state may be wrong."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.live(stored(1))
    stream.engine.publish(stored(2))
    stream.engine.batches, known = stream.engine.batches[:1], len(stream.engine.batches)
    for number in range(known + 3, known + 20):
        await stream.follower.on_message(frames(number, stored(100 + number), ts=float(number)))
    assert stream.state == "degraded/lost_events"
    assert len(stream.engine.asked) <= 3
    assert stream.blocks == {100 + number for number in range(known + 3, known + 20)}


def raw(seq: int, events: bytes, count: int) -> list[bytes]:
    """Return a message with so many events, already packed."""
    head = b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big")
    return [b"kv-events", seq.to_bytes(8, "big"), head + events + b"\xc0"]


@pytest.mark.parametrize(
    ("event", "malformed"), [(b"\xc0", True), (b"\x81\xa4type\xaaBlockMoved", False)], ids=["nil", "unknown"]
)
async def test_events_that_are_skipped_are_work(event: bytes, malformed: bool) -> None:
    """An engine that publishes what cannot be read does not hold the event loop: at most a slice's worth at once."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.follower.on_message(raw(0, 50_000 * event, 50_000))
    assert stream.pauses >= 50_000 // 512
    assert stream.state == ("degraded/malformed" if malformed else "exact/following")


async def test_a_batch_of_too_many_events_is_refused_unread() -> None:
    """Eight megabytes of nothing cost next to nothing, and are lost."""
    stream = Stream(Engine())
    await stream.connect()
    await stream.follower.on_message(raw(0, bytes([0xC0]) * 8_000_000, 8_000_000))
    assert stream.state == "degraded/malformed"
    assert stream.count("batches", "malformed") == 1
    await stream.live(stored(1))
    assert stream.pauses >= 1


class RepeatsItself(Engine):
    """Replays everything whatever it is asked for."""

    async def replay(self, start: int) -> AsyncGenerator[list[bytes], None]:
        async for message in super().replay(0):
            yield message


async def test_replayed_batches_that_are_not_taken_pause_as_well() -> None:
    """Those that were applied before, however many wait in the socket."""
    engine = RepeatsItself()
    stream = Stream(engine, slice_blocks=100)
    await stream.connect()
    history = [engine.publish(stored(n)) for n in range(1000)]
    for message in history:
        await stream.follower.on_message(message)
    stream.pauses = 0
    await stream.connect()
    assert stream.pauses >= 50


async def test_batches_that_cannot_be_read_pause_as_well() -> None:
    """However many come in a row."""
    stream = Stream(Engine())
    await stream.connect()
    for number in range(640):
        await stream.follower.on_message([b"", number.to_bytes(8, "big"), b"\xc1"])
    assert stream.pauses >= 10
