"""Our end of a ZeroMQ connection: against libzmq's own sockets, and against peers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest
import uvloop
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.errors import BadResponse
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.features.kv_events import zmtp
from kvproxy.features.kv_events.sockets import Subscription, read_replay
from kvproxy.features.kv_events.zmtp import MessageBuffer, ReceiveMemory, ZmtpConnection, ZmtpError, parse_address
from tests.support.until import until

GREETING = b"\xff" + 8 * b"\0" + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + 32 * b"\0"


def encoded(frames: list[bytes], flags: int = 0) -> bytes:
    """As ZMTP writes a message, long frames and short."""
    parts = []
    for index, frame in enumerate(frames):
        more = flags | (index < len(frames) - 1)
        size = len(frame)
        parts.append(bytes((more, size)) if size < 256 else bytes((more | 2,)) + size.to_bytes(8, "big"))
        parts.append(frame)
    return b"".join(parts)


@given(
    messages=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=8),
    cuts=st.lists(st.integers(0, 4000), max_size=20),
)
def test_messages_come_out_however_they_are_cut(messages: list[list[bytes]], cuts: list[int]) -> None:
    """Fed in any pieces, with the next message asked for after each."""
    wire = b"".join(encoded(one) for one in messages)
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    buffer, found = MessageBuffer(max_message_bytes=10_000, max_frames=5), []
    for start, end in pairwise(edges):
        buffer.feed(wire[start:end])
        while (taken := buffer.take()) is not None:
            assert not taken[0]
            found.append(taken[1])
    assert found == messages
    assert len(buffer) == 0


@pytest.mark.parametrize(
    "wire",
    [encoded([b"x"] * 4), b"\x02" + (1000).to_bytes(8, "big"), encoded([b"x" * 60, b"x" * 60])],
    ids=["too many frames", "a frame too long, at its head", "frames too long together"],
)
def test_a_message_out_of_bounds_is_refused(wire: bytes) -> None:
    """As soon as it is known."""
    buffer = MessageBuffer(max_message_bytes=100, max_frames=3)
    buffer.feed(wire)
    with pytest.raises(ZmtpError, match="more frames or bytes"):
        buffer.take()


def test_addresses() -> None:
    """Of TCP and of local sockets."""
    assert parse_address("tcp://[::1]:5557") == ("::1", 5557)
    assert parse_address("ipc:///run/events") == ("/run/events", 0)
    for wrong in ("tcp://host", "tcp://:1", "tcp://h:0", "tcp://h:x", "udp://h:1", "ipc://", ""):
        with pytest.raises(ValueError, match="not an address"):
            parse_address(wrong)


READY = encoded([b"\x05READY\x0bSocket-Type\0\0\0\x03PUB"], flags=4)


class Peer:
    """A server that says what it is told, and remembers what it heard."""

    def __init__(self, *said: bytes) -> None:
        self.said = said
        self.heard = b""
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        for one in self.said:
            writer.write(one)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.heard += data
        writer.close()


@contextlib.asynccontextmanager
async def serving(peer: Peer) -> AsyncIterator[str]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in peer.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.contextmanager
def subscribed(address: str) -> Iterator[Subscription]:
    subscription = Subscription(KvEventSource(0, address, topic="kv"))
    try:
        yield subscription
    finally:
        subscription.close()


async def test_a_subscription_says_hello_and_takes_messages() -> None:
    """Greeting, READY as SUB, the topic; then what comes, over as many frames as it has."""
    peer = Peer(GREETING, READY, encoded([b"kv", b"1", b"x" * 1000]))
    async with serving(peer) as address:
        with subscribed(address) as subscription:
            await until(lambda: subscription._connection is not None and subscription._connection.has_message)
            assert subscription.take_connections() == [True]
            assert subscription.take_message() == [b"kv", b"1", b"x" * 1000]
            assert subscription.take_message() is None
            await until(lambda: peer.heard.endswith(encoded([b"\x01kv"])))
            assert peer.heard.startswith(b"\xff")
            assert b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB" in peer.heard


@pytest.mark.parametrize(
    "said",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
        (b"\xff" + 8 * b"\0" + b"\x7f\x01" + 53 * b"\0",),
        (GREETING.replace(b"\x7f\x03", b"\x7f\x02"), READY),
        (GREETING.replace(b"NULL" + 16 * b"\0", b"CURVE" + 15 * b"\0"),),
        (GREETING, encoded([b"\x05ERROR\x05never"], flags=4)),
        (GREETING, encoded([b"not a command"])),
        (GREETING, b"\x02" + (4000).to_bytes(8, "big") + 5000 * b"x"),
    ],
    ids=["http", "old version", "no version", "encrypted", "refused", "no READY", "endless READY"],
)
async def test_other_peers_are_left_and_tried_again(said: tuple[bytes, ...]) -> None:
    """None of them counts as connected."""
    peer = Peer(*said)
    async with serving(peer) as address:
        with subscribed(address) as subscription:
            await until(lambda: peer.connections >= 2)
            assert subscription.take_connections() == []
            assert subscription.take_message() is None


async def test_messages_before_a_broken_connection_are_applied() -> None:
    """Whole messages first; the next connection begins when they are taken, so that nothing piles up."""
    peer = Peer(GREETING, READY, encoded([b"kv", b"1"]), encoded([b"kv", b"2"]), b"\x01\x05half")
    async with serving(peer) as address:
        with subscribed(address) as subscription:
            await until(lambda: subscription._connection is not None and subscription._connection.has_message)
            peer.writers[0].close()
            changes: list[bool] = []

            def told(*expected: bool) -> bool:
                changes.extend(subscription.take_connections())
                return changes == list(expected)

            await until(lambda: told(True, False))
            assert peer.connections == 1
            assert [subscription.take_message(), subscription.take_message()] == [[b"kv", b"1"], [b"kv", b"2"]]
            assert subscription.take_message() is None
            await until(lambda: told(True, False, True))


async def test_commands_before_the_end_hide_no_message() -> None:
    """More of them than are obeyed at once; the message after them is taken before the next connection begins."""
    pong = encoded([b"\x04PONG"], flags=4)
    peer = Peer(GREETING, READY, pong * 500 + encoded([b"kv", b"last"]))
    async with serving(peer) as address:
        with subscribed(address) as subscription:
            await until(lambda: subscription._connection is not None and subscription._connection.has_message)
            peer.writers[0].close()
            changes: list[bool] = []

            def is_lost() -> bool:
                changes.extend(subscription.take_connections())
                return changes == [True, False]

            await until(is_lost)
            assert subscription.take_message() is None  # a few commands further
            assert not subscription._taken.is_set()
            while (found := subscription.take_message()) is None:
                pass
            assert found == [b"kv", b"last"]
            await until(lambda: subscription.take_message() is None and peer.connections == 2)


async def test_a_subscription_that_ends_while_it_connects_leaves_nothing_open() -> None:
    """The peer accepts and says nothing: its end sees the connection close."""
    peer = Peer()
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.connections += 1
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        ended.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        with subscribed(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
            await until(lambda: peer.connections == 1)
        await ended.wait()


async def test_pings_are_answered() -> None:
    """With the context they carry."""
    peer = Peer(GREETING, READY, encoded([b"\x04PING\x00\x0acontext"], flags=4))
    async with serving(peer) as address:
        with subscribed(address) as subscription:

            def answered() -> bool:
                assert subscription.take_message() is None
                return peer.heard.endswith(encoded([b"\x04PONGcontext"], flags=4))

            await until(answered)


async def test_a_silent_peer_is_asked_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is gone closes no connection."""
    monkeypatch.setattr(zmtp, "PING_AFTER_S", 0.01)
    monkeypatch.setattr(zmtp, "LOST_AFTER_S", 0.03)
    peer = Peer(GREETING, READY)
    async with serving(peer) as address:
        with subscribed(address) as subscription:
            await until(lambda: peer.connections >= 2)
            assert subscription.take_connections()[:2] == [True, False]
            assert peer.heard.count(encoded([b"\x04PING\0\0"], flags=4)) >= 2  # in each silence before the last


async def test_a_peer_that_is_not_read_is_not_called_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may well be speaking: only the one that is listened to, and says nothing, is lost."""
    monkeypatch.setattr(zmtp, "PING_AFTER_S", 0.01)
    monkeypatch.setattr(zmtp, "LOST_AFTER_S", 0.03)
    changed = asyncio.Event()

    def connection(memory: ReceiveMemory) -> ZmtpConnection:
        return ZmtpConnection(b"SUB", changed=changed.set, memory=memory, max_message_bytes=2000, max_frames=1)

    talkative, mute = Peer(GREETING, READY, encoded([b"x" * 900])), Peer(GREETING, READY)
    unread = connection(ReceiveMemory(limit_bytes=1, connection_bytes=1))
    async with serving(talkative) as at_talkative, serving(mute) as at_mute:
        await zmtp.open_connection(at_talkative, unread)
        await until(lambda: unread.has_message)
        for _ in range(2):  # as long as the other needs to be lost, twice
            silent = connection(ReceiveMemory())
            await zmtp.open_connection(at_mute, silent)
            await until(partial(getattr, silent, "lost"))
        assert not unread.lost
        assert unread.take_message() == [b"x" * 900]
        unread.close()


@pytest.mark.parametrize(
    ("own_bytes", "held_bytes", "room"),
    [(99, 499, True), (100, 100, False), (0, 500, False), (0, 0, True)],
    ids=["below both", "its own share", "all together", "empty"],
)
def test_either_bound_ends_the_room(own_bytes: int, held_bytes: int, room: bool) -> None:
    """That of one connection, and that of all."""
    memory = ReceiveMemory(limit_bytes=500, connection_bytes=100)
    memory.held_bytes = held_bytes
    assert memory.has_room(own_bytes) is room


async def test_a_replay_that_breaks_off_says_so() -> None:
    """And gives back what it held."""
    memory = ReceiveMemory()
    peer = Peer(GREETING, READY)
    async with serving(peer) as address:
        messages = read_replay(address, 7, idle_timeout_s=60, memory=memory)
        first = asyncio.create_task(anext(messages))
        await until(lambda: peer.heard.endswith(encoded([b"", (7).to_bytes(8, "big")])))
        peer.writers[0].write(encoded([b"", b"1", b"x"]) + b"\x01\x05half")
        assert await first == [b"", b"1", b"x"]
        peer.writers[0].close()
        with pytest.raises(BadResponse, match="broke off"):
            await anext(messages)
    assert memory.held_bytes == 0


async def test_an_engine_that_restarts_while_its_batches_wait_ends_nothing() -> None:
    """libzmq aborts the process here: a full queue, a lost connection, and then a read."""
    with zmq.Context() as context:
        first = publisher(context, 0)
        address = first.getsockopt_string(zmq.LAST_ENDPOINT)
        with subscribed(address) as subscription:
            await until(lambda: subscription.take_connections() == [True])
            engine = first
            for _ in range(3):
                await until(until_a_message(subscription, engine))
                for number in range(300):
                    engine.send_multipart([b"kv", b"%d" % number, b"x" * 10_000])
                await until(lambda: subscription._connection is not None and subscription._connection._paused)
                engine.close(0)
                engine = publisher(context, int(address.rpartition(":")[2]))
                changes: list[bool] = []

                def up_again(changes: list[bool] = changes) -> bool:
                    while subscription.take_message() is not None:
                        pass
                    changes += subscription.take_connections()
                    return changes == [False, True]

                await until(up_again)
            engine.close(0)


def publisher(context: zmq.Context[zmq.Socket[bytes]], port: int) -> zmq.Socket[bytes]:
    """Bound there, as soon as the one before is gone."""
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    for _ in range(1000):
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError:
            continue
        return socket
    raise AssertionError("the port stays taken")


def until_a_message(subscription: Subscription, engine: zmq.Socket[bytes]) -> Callable[[], bool]:
    """Return a condition that holds once a message arrives, which proves the subscription."""

    def arrived() -> bool:
        engine.send_multipart([b"kv", b"first"])
        return subscription.take_message() is not None

    return arrived


async def test_a_connection_holds_no_more_than_its_share() -> None:
    """It stops reading with a whole message at hand, and goes on once that is taken."""
    memory = ReceiveMemory(limit_bytes=1000, connection_bytes=1000)
    wire = encoded([b"x" * 900])
    peer = Peer(GREETING, READY, *[wire] * 2000)
    changed = asyncio.Event()
    connection = ZmtpConnection(b"SUB", changed=changed.set, memory=memory, max_message_bytes=2000, max_frames=1)
    async with serving(peer) as address:
        await zmtp.open_connection(address, connection)
        await until(lambda: connection._paused)
        assert 1000 <= memory.held_bytes < 1000 + 256 * 1024
        taken = 0
        while taken < 2000:
            if connection.take_message() is None:
                await asyncio.sleep(0)
            else:
                taken += 1
        assert memory.held_bytes == 0
        connection.close()


async def test_a_flood_of_commands_is_obeyed_in_steps_and_answered_within_a_bound() -> None:
    """Nothing but PINGs, from a peer that takes none of the answers."""
    ping = encoded([b"\x04PING\x00\x0a" + b"x" * 16], flags=4)
    peer = Peer(GREETING, READY, *[ping * 10_000] * 40)
    hungry = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.connections += 1
        peer.writers.append(writer)
        for one in peer.said:
            writer.write(one)
        await hungry.wait()

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what it does not read is soon too much
    server = await asyncio.start_server(deaf, sock=listening)
    async with server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with subscribed(address) as subscription:

            def left() -> bool:
                assert subscription.take_message() is None
                return peer.connections >= 2

            await until(left)
        hungry.set()
        for writer in peer.writers:
            writer.close()


def test_the_loop_of_serve_carries_it_too() -> None:
    """uvloop's transports are no asyncio.Transport by class."""

    async def exchange() -> list[bytes] | None:
        with (
            zmq.Context() as context,
            publisher(context, 0) as engine,
            subscribed(engine.getsockopt_string(zmq.LAST_ENDPOINT)) as subscription,
        ):
            await until(until_a_message(subscription, engine))
            engine.send_multipart([b"kv", b"1", b"x"])
            await until(lambda: subscription._connection is not None and subscription._connection.has_message)
            last = None
            while (found := subscription.take_message()) is not None:
                last = found
            return last

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(exchange()) in ([b"kv", b"1", b"x"], [b"kv", b"first"])
