"""A stream's state follows from facts, and silence is one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvproxy.features.kv_events.status import StreamHealth, StreamReason, StreamState, StreamStatus, index_worth
from tests.support.clock import FakeClock


def health(clock: FakeClock) -> tuple[StreamHealth, list[str]]:
    seen: list[str] = []

    def changed(status: StreamStatus) -> None:
        seen.append(f"{status.state}/{status.reason}")

    return StreamHealth(changed=changed, clock=clock, silence_s=30.0, block_tokens=128), seen


def following(clock: FakeClock) -> tuple[StreamHealth, list[str]]:
    stream, seen = health(clock)
    stream.mark_connected()
    stream.mark_synchronised(None)
    seen.clear()
    return stream, seen


def test_the_way_up(clock: FakeClock) -> None:
    """Connecting, synchronising, exact; each said once."""
    stream, seen = health(clock)
    assert (stream.status.state, stream.status.reason) == ("connecting", "starting")
    stream.mark_connected()
    stream.mark_connected()
    stream.mark_synchronised(None)
    stream.mark_synchronised(None)
    assert seen == ["connecting/synchronising", "exact/following"]


@pytest.mark.parametrize(
    ("happens", "status"),
    [
        (lambda stream: stream.mark_disconnected(), "degraded/disconnected"),
        (lambda stream: stream.mark_incomplete(StreamReason.MALFORMED), "degraded/malformed"),
        (lambda stream: stream.mark_synchronised(StreamReason.PARTIAL_HISTORY), "degraded/partial_history"),
        (lambda stream: stream.mark_failed(), "degraded/failed"),
    ],
)
def test_a_degraded_stream_has_its_reason(
    clock: FakeClock, happens: Callable[[StreamHealth], None], status: str
) -> None:
    """And a synchronisation with nothing missing heals it."""
    stream, seen = following(clock)
    happens(stream)
    assert seen == [status]
    stream.mark_connected()
    stream.mark_synchronised(None)
    assert seen[-1] == "exact/following"


def test_an_engine_that_prefills_without_a_word_is_silent(clock: FakeClock) -> None:
    """Four blocks' worth and 30 s without an event: the index is not believed any more."""
    stream, seen = following(clock)
    stream.record_traffic(4 * 128)
    clock.advance(29.9)
    stream.record_traffic(128)
    assert seen == []
    clock.advance(0.1)
    stream.record_traffic(128)
    assert seen == ["approximate/silent"]


def test_a_word_restarts_the_wait(clock: FakeClock) -> None:
    """Earlier pings are answered by it, and their 30 s are over too."""
    stream, seen = following(clock)
    stream.record_traffic(128)
    clock.advance(29.0)
    stream.record_batch()
    clock.advance(29.0)
    stream.record_traffic(4 * 128)
    assert seen == []
    clock.advance(30.0)
    stream.record_traffic(128)
    assert seen == ["approximate/silent"]


def test_traffic_that_stores_no_block_proves_nothing(clock: FakeClock) -> None:
    """Hits and short prompts publish nothing; three blocks are too few to judge."""
    stream, seen = following(clock)
    for _ in range(100):
        stream.record_traffic(127)
        stream.record_traffic(0)
        clock.advance(10)
    for _ in range(3):
        stream.record_traffic(128)
        clock.advance(100)
    assert seen == []


def test_a_word_ends_the_silence(clock: FakeClock) -> None:
    """And the count starts at zero."""
    stream, seen = following(clock)
    stream.record_traffic(4 * 128)
    clock.advance(31)
    stream.record_batch()
    stream.record_traffic(128)
    assert seen == []
    stream.record_traffic(4 * 128)
    clock.advance(31)
    stream.record_traffic(128)
    stream.record_batch()
    assert seen == ["approximate/silent", "exact/following"]


def test_silence_outweighs_everything_else(clock: FakeClock) -> None:
    """Also where no connection ever came up: a wrong port is said, not waited for."""
    stream, seen = health(clock)
    stream.record_traffic(10_000)
    clock.advance(31)
    stream.record_traffic(10_000)
    assert seen == ["approximate/silent"]


def test_a_lost_connection_ends_the_backlog_with_it(clock: FakeClock) -> None:
    """A backlog of the old connection means nothing for the next one."""
    stream, seen = following(clock)
    assert stream.fell_behind(True)
    stream.mark_disconnected()
    stream.mark_connected()
    stream.mark_synchronised(None)
    assert seen[-1] == "exact/following"


EXACT = StreamStatus(StreamState.EXACT, StreamReason.FOLLOWING)
LOST = StreamStatus(StreamState.DEGRADED, StreamReason.LOST_EVENTS)
STARTING = StreamStatus(StreamState.CONNECTING, StreamReason.STARTING)
SILENT = StreamStatus(StreamState.APPROXIMATE, StreamReason.SILENT)


@pytest.mark.parametrize(
    ("streams", "state"),
    [
        ({}, StreamState.APPROXIMATE),
        ({0: EXACT, 1: EXACT}, StreamState.EXACT),
        ({0: EXACT, 1: STARTING}, StreamState.CONNECTING),
        ({0: LOST, 1: STARTING}, StreamState.DEGRADED),
        ({0: EXACT, 1: SILENT, 2: LOST}, StreamState.APPROXIMATE),
    ],
)
def test_the_worst_rank_decides(streams: dict[int, StreamStatus], state: StreamState) -> None:
    """An index that misses one rank's events is not exact."""
    assert index_worth(streams) is state
