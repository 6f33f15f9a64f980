"""False messages, stores that refuse, and files that go: dropped and counted, and over once heartbeats contradict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr

from kvproxy.features.exchange import peer_requests, stores, wire
from kvproxy.features.exchange.datagrams import _READS, MAX_WORKERS, DatagramLink
from kvproxy.features.exchange.deltas import Spent
from kvproxy.features.exchange.lives import MISSED
from kvproxy.features.exchange.stores import MAX_RECALLED_BYTES, MAX_REPLY_BYTES, RedisLink, StoreLink
from kvproxy.features.exchange.wire import Batch, Bye, Heartbeat, Origin, PeerSnapshot, decode, decode_deltas, encode
from kvproxy.operate.companion import Siblings
from tests.features.exchange.support import BEAT_S, A, Bus, Node, deciding, pair
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve
from tests.support.ports import free_port
from tests.support.until import until

FAR = 2**60


def beat_of(node: Node, seq: int | None = None) -> Heartbeat:
    journal = node.journal
    told = journal.seq if seq is None else seq
    return Heartbeat(node.origin, told, node.now, journal.told, joining=False, blocks=0, echoes=[])


def plant(node: Node, message: wire.Message) -> None:
    """Send a message of a client in another's name."""
    node.peers.receive(message, node.now)


def beats(bus: Bus, *nodes: Node, count: int = 1) -> None:
    for _ in range(count):
        bus.now += BEAT_S
        for node in nodes:
            node.beat()
        bus.deliver()


def test_a_text_that_is_not_utf8_is_no_message() -> None:
    """The error is that of every other malformed message."""
    payload = encode(Bye(Origin("abcd", 0, 1))).replace(b"abcd", b"\xff\xfe\xfd\xfc")
    with pytest.raises(msgspec.DecodeError):
        decode(payload)
    kept = wire.encode_deltas([Spent(0, "abcd", "requests", 1.0)]).replace(b"abcd", b"\xff\xfe\xfd\xfc")
    with pytest.raises(msgspec.DecodeError):
        decode_deltas(kept)


async def test_undecodable_events_are_counted(tmp_path: Path) -> None:
    """And logged not at all: thousands may come."""
    payload = encode(Bye(Origin("abcd", 0, 1))).replace(b"abcd", b"\xff\xfe\xfd\xfc")
    async with serve(FakeEngine("a")) as engine, deciding(engine, siblings=Siblings(tmp_path, 0, 2)) as one:
        one.sync._heard(payload, store=True)
        assert one.metric("kvproxy_sync_messages_total", outcome="malformed") == 1


def test_loads_of_a_batch_that_never_was_give_way() -> None:
    """A row of batch 2^60 would be the latest for ever; the heartbeat tells how far the peer is."""
    bus, one, two = pair()
    one.begin(A, 1)
    one.flush()
    bus.deliver()
    plant(two, Batch(one.origin, FAR, 0.0, [], one.journal.rows(one.now)))
    beats(bus, one, two)
    request = one.begin(A, 2)
    one.flush()
    bus.deliver()
    assert two.in_flight()[A] == 2
    one.end(request)
    beats(bus, one, two, count=3)
    assert two.in_flight()[A] == 1
    assert two.peers.known[one.origin.place].waiting == 0


def test_a_standing_that_never_was_gives_way() -> None:
    """After two heartbeats that are behind it, the peer is asked how it stands."""
    bus, one, two = pair()
    one.begin(A, 1)
    beats(bus, one, two)
    plant(two, PeerSnapshot(one.origin, FAR, FAR, 0, [], [], more=False))
    beats(bus, one, two, count=4)
    one.begin(A, 2, 3)
    beats(bus, one, two, count=2)
    assert two.in_flight()[A] == 2
    assert two.held(2, 3) == {A: 2}


@pytest.mark.parametrize("end", ["bye", "later life"])
def test_a_peer_that_was_said_to_be_over_and_beats_on_is_back(end: str) -> None:
    """After three heartbeats, and once nothing comes of what is said to have taken its place."""
    bus, one, two = pair()
    beats(bus, one, two)
    later = Origin(one.origin.host, one.origin.worker, one.origin.epoch + FAR)
    plant(two, Bye(one.origin) if end == "bye" else Heartbeat(later, 0, 0.0, 0, joining=False, blocks=0, echoes=[]))
    beats(bus, one, two, count=2 * MISSED + 2)
    assert [peer.origin for peer in two.peers.living] == [one.origin]
    one.begin(A, 7)
    beats(bus, one, two)
    assert two.in_flight()[A] == 1


def test_a_life_that_is_over_stays_over_while_the_next_one_beats() -> None:
    """Two processes of one name do not take each other's place in turn."""
    bus, one, two = pair()
    beats(bus, one, two)
    later = Origin(one.origin.host, one.origin.worker, one.origin.epoch + 1)
    for _ in range(10):
        plant(two, Heartbeat(later, 0, 0.0, 0, joining=False, blocks=0, echoes=[]))
        beats(bus, one, two)
    assert [peer.origin for peer in two.peers.living] == [later]


def test_state_of_a_silent_peer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens requests, falls silent and comes back, again and again."""
    monkeypatch.setattr(peer_requests, "MAX_OPEN", 5)
    bus, one, two = pair()
    for _ in range(3):
        for number in range(4):
            one.begin(A, number)
        beats(bus, one, two)
        two.peers.known[one.origin.place].die(two.now)
        beats(bus, one, two)
        assert len(two.peers.known[one.origin.place].heard.requests.open) <= 5


def test_worker_numbers_that_no_configuration_has_are_not_sent_to(tmp_path: Path) -> None:
    """A client that may write to the folder could name thousands."""
    link = DatagramLink(Siblings(tmp_path, 0, 2), on_message=lambda payload: None)
    for number in (-1, 1, MAX_WORKERS - 1, MAX_WORKERS, 10**9):
        link.know(number)
    assert link._others == {1, MAX_WORKERS - 1}


async def test_a_socket_whose_file_is_gone_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Something cleans up temporary folders."""
    heard: list[bytes] = []
    folder = tmp_path / "workers"
    async with DatagramLink(Siblings(folder, 0, 2), on_message=heard.append) as link:
        link.renew()
        assert not caplog.records
        for remove in ((folder / "sync-0.sock").unlink, lambda: shutil.rmtree(folder)):
            remove()
            link.renew()
            assert caplog.text.count("was removed") == 1
            caplog.clear()
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
                other.sendto(b"hello", str(folder / "sync-0.sock"))
            await until(lambda: heard == [b"hello"])
            heard.clear()
        assert folder.stat().st_mode & 0o777 == 0o700
    link.renew()  # nothing is left to renew


async def test_a_folder_of_another_user_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been made where ours was removed; that is logged once, and what was bound before stays."""
    folder = tmp_path / "workers"
    async with DatagramLink(Siblings(folder, 0, 2), on_message=lambda payload: None) as link:
        bound = link._socket
        shutil.rmtree(folder)
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
        for _ in range(3):
            link.renew()
        assert caplog.text.count("is another user's") == 1
        assert link._socket is bound


async def test_a_flood_of_datagrams_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    """As many as the kernel holds are read a few in each turn; a sender beyond that has to wait."""
    heard: list[bytes] = []
    sent = 0
    async with DatagramLink(Siblings(tmp_path, 0, 2), on_message=heard.append):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while sent < 100_000:
                    other.sendto(b"x", str(tmp_path / "sync-0.sock"))
                    sent += 1
        assert 0 < sent < 100_000
        most = 0
        while len(heard) < sent:
            before = len(heard)
            await asyncio.sleep(0)
            most = max(most, len(heard) - before)
    assert most == _READS


class Refusing(StoreLink):
    """Takes subscriptions and no messages."""

    name = "refusing"

    def __init__(self, **hears: Any) -> None:
        super().__init__(SecretStr("x://here:1"), "t", Origin("h", 0, 1), beat_s=0.001, rng=Random(0), **hears)
        self.tried = 0

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[None]:
        self.tried += 1
        yield

    async def _receive(self, connection: None) -> None:
        await asyncio.Event().wait()

    async def _publish(self, connection: None, messages: list[tuple[str, bytes]]) -> None:
        raise PermissionError("no")


async def test_a_store_that_refuses_messages_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was never there, so that no share of a limit changes; the pauses grow, and one line says so."""
    monkeypatch.setattr(stores, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(stores, "LONGEST_PAUSE_S", 0.01)
    changes: list[bool] = []
    async with Refusing(on_message=lambda payload: None, on_change=changes.append) as link:
        await until(lambda: link.tried > 5)
        assert (link.connected, changes) == (False, [])
    assert len([one for one in caplog.records if "is away" in one.getMessage()]) == 1


@asynccontextmanager
async def redis_of(
    tmp_path: Path, *, on_message: Callable[[bytes], None] = lambda payload: None
) -> AsyncIterator[tuple[RedisLink, Any]]:
    """Yield a link to a real server, and a client of it."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    from redis.asyncio import Redis

    port = free_port()
    program = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*program, stdout=null, stderr=null)
    client = Redis(port=port)
    url, origin = SecretStr(f"redis://127.0.0.1:{port}"), Origin("h", 0, 1)
    hears: dict[str, Any] = {"on_message": on_message, "on_change": lambda reached: None}
    try:
        async with RedisLink(url, "t", origin, beat_s=0.05, rng=Random(0), **hears) as link:
            await until(lambda: link.connected)
            yield link, client
    finally:
        await client.aclose()
        process.kill()
        await process.wait()


async def test_keys_that_are_none_of_ours_are_replaced(tmp_path: Path) -> None:
    """Of another type, or longer than anything that is kept."""
    async with redis_of(tmp_path) as (link, client):
        assert await link.recall(60.0) == (b"", 60.0 + 0.002)
        await client.rpush("t.kept", "a")
        assert await link.recall(60.0) == (b"", 0.0)
        await link.keep(b"kept", 60.0)
        assert (await link.recall(60.0))[0] == b"kept"
        await client.set("t.kept", b"x" * (MAX_RECALLED_BYTES + 100_000))
        assert len((await link.recall(60.0))[0]) == MAX_RECALLED_BYTES + 1


async def test_a_huge_message_ends_its_connection(tmp_path: Path) -> None:
    """It is not collected; the connection is made again, and what follows arrives."""
    heard: list[int] = []
    async with redis_of(tmp_path, on_message=lambda payload: heard.append(len(payload))) as (_, client):
        await client.publish("t", bytes(MAX_RECALLED_BYTES))
        await until(lambda: heard == [MAX_RECALLED_BYTES])
        await client.publish("t", bytes(2 * MAX_REPLY_BYTES))
        while heard[-1] != 5:
            await client.publish("t", b"small")
            await asyncio.sleep(0.01)
    assert set(heard) == {MAX_RECALLED_BYTES, 5}


async def test_a_reply_is_bounded_before_it_is_read() -> None:
    """A parser that asks for all of it at once gets nothing."""
    from redis.exceptions import ConnectionError as RedisConnectionError

    from kvproxy.features.exchange.bounded_redis import BoundedReader

    stream = asyncio.StreamReader()
    stream.feed_data(bytes(100))
    bounded = BoundedReader(stream, 60)
    assert await bounded.read(50) == bytes(50)
    with pytest.raises(RedisConnectionError, match="longer than any of ours"):
        await bounded.readexactly(20)
    bounded.left = 50
    assert await bounded.readexactly(50) == bytes(50)
    assert not bounded.at_eof()
