"""The protocol itself, as a peer that keeps to it and one that does not."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hpack import Encoder

from kvproxy.features.picker.http2 import Http2Connection, Stream
from kvproxy.features.picker.http2_frames import PREFACE, Code, Fields, encode_fields
from tests.support.until import until

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, PRIORITISED = 1, 4, 8, 32


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def block(**headers: str) -> bytes:
    """Return a header block."""
    encoded: bytes = Encoder().encode({":method": "POST", ":path": "/x", **headers})
    return encoded


class Echo:
    """Sends back what comes, and ends with the peer."""

    def __init__(self, stream: Stream, fields: Fields) -> None:
        self.stream, self.fields, self.left = stream, fields, False
        stream.start(encode_fields({b":status": b"200"}))

    def received(self, data: bytes) -> None:
        self.stream.send(data)

    def half_closed(self) -> None:
        self.stream.finish(encode_fields({b"grpc-status": b"0"}))

    def gone(self) -> None:
        self.left = True


@dataclass
class Peer:
    """The client's side."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    handlers: list[Echo]
    connections: set[Http2Connection]

    def say(self, *frames: bytes) -> None:
        """Send them."""
        self.writer.write(b"".join(frames))

    async def hear(self) -> tuple[int, int, int, bytes]:
        """Return the next frame: kind, flags, stream, payload."""
        async with asyncio.timeout(30):
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    async def hear_of(self, kind: int) -> tuple[int, int, bytes]:
        """Return the next frame of this kind: flags, stream, payload."""
        while True:
            found, flags, stream, payload = await self.hear()
            if found == kind:
                return flags, stream, payload

    async def end(self) -> int:
        """Return the code with which the connection ends."""
        _, _, payload = await self.hear_of(GOAWAY)
        async with asyncio.timeout(30):
            while await self.reader.read(65536):
                pass
        return int(struct.unpack("!II", payload[:8])[1])


@contextlib.asynccontextmanager
async def connected(*, max_streams: int = 10, hello: bytes = PREFACE + frame(SETTINGS, 0, 0)) -> AsyncIterator[Peer]:
    """One connection to a server that echoes."""
    handlers: list[Echo] = []
    connections: set[Http2Connection] = set()

    def accept(stream: Stream, fields: Fields) -> Echo:
        handlers.append(Echo(stream, fields))
        return handlers[-1]

    def make() -> Http2Connection:
        def change(connection: Http2Connection, there: bool) -> None:
            (connections.add if there else connections.discard)(connection)

        return Http2Connection(accept, max_streams=max_streams, on_change=change)

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(hello)
    try:
        yield Peer(reader, writer, handlers, connections)
    finally:
        for connection in list(connections):
            connection.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        server.close()


async def test_a_stream_is_answered_in_frames_that_arrive_in_any_cut() -> None:
    """Byte by byte, with padding, priority and a continuation."""
    head = block(answer="yes")
    frames = (
        frame(HEADERS, PRIORITISED | PADDED, 1, b"\x02" + b"\0" * 5 + head[:3] + b"\0\0")
        + frame(CONTINUATION, END_HEADERS, 1, head[3:])
        + frame(DATA, PADDED | END_STREAM, 1, b"\x03hello\0\0\0")
    )
    async with connected() as peer:
        for byte in frames:
            peer.say(bytes((byte,)))
            await peer.writer.drain()
        assert await peer.hear_of(DATA) == (0, 1, b"hello")
        flags, _, _ = await peer.hear_of(HEADERS)
        assert flags == END_STREAM | END_HEADERS
        assert peer.handlers[0].fields[b"answer"] == b"yes"
        assert not peer.handlers[0].left


async def test_data_beyond_the_windows_waits() -> None:
    """The stream's and the connection's; what other streams send is not held up by it."""
    settings = frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 10))
    async with connected(hello=PREFACE + settings) as peer:
        peer.say(frame(HEADERS, END_HEADERS, 1, block()), frame(DATA, END_STREAM, 1, b"x" * 25))
        assert await peer.hear_of(DATA) == (0, 1, b"x" * 10)
        peer.say(frame(HEADERS, END_HEADERS, 3, block()), frame(DATA, 0, 3, b"y" * 5))
        assert await peer.hear_of(DATA) == (0, 3, b"y" * 5)
        peer.say(frame(WINDOW, 0, 1, struct.pack("!I", 12)))
        assert await peer.hear_of(DATA) == (0, 1, b"x" * 12)
        peer.say(frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 20)))
        assert await peer.hear_of(DATA) == (0, 1, b"x" * 3)
        assert (await peer.hear_of(HEADERS))[0] == END_STREAM | END_HEADERS


async def test_a_peer_that_takes_nothing_back_may_send_no_more() -> None:
    """The data that waits for it is bounded, since its own window is not opened again."""
    async with connected(hello=PREFACE + frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 0))) as peer:
        peer.say(frame(HEADERS, END_HEADERS, 1, block()))
        for _ in range(64):
            peer.say(frame(DATA, 0, 1, b"x" * 16_384))
        peer.say(frame(PING, 0, 0, b"12345678"))
        while (heard := await peer.hear())[0] != PING:
            assert heard[:3] != (WINDOW, 0, 1)
        peer.say(frame(WINDOW, 0, 1, struct.pack("!I", 1024 * 1024)), frame(WINDOW, 0, 0, struct.pack("!I", 2**24)))
        assert (await peer.hear_of(WINDOW))[1] == 1


async def test_a_reset_tells_the_handler() -> None:
    """And what comes for the stream afterwards is passed over."""
    async with connected() as peer:
        peer.say(frame(HEADERS, END_HEADERS, 1, block()), frame(RESET, 0, 1, b"\0\0\0\x08"), frame(DATA, 0, 1, b"x"))
        peer.say(frame(HEADERS, END_HEADERS, 3, block()), frame(DATA, 0, 3, b"y"))
        assert await peer.hear_of(DATA) == (0, 3, b"y")
        assert [handler.left for handler in peer.handlers] == [True, False]
        peer.writer.close()
        await until(lambda: not peer.connections)
        assert peer.handlers[1].left


async def test_streams_beyond_the_bound_are_refused() -> None:
    """They may come again; the table of headers stays right."""
    async with connected(max_streams=1) as peer:
        encoder = Encoder()
        for name in (1, 3, 5):
            peer.say(frame(HEADERS, END_HEADERS, name, encoder.encode({":path": "/x", "twice": "the same"})))
        assert await peer.hear_of(RESET) == (0, 3, struct.pack("!I", Code.REFUSED_STREAM))
        assert (await peer.hear_of(RESET))[1] == 5
        peer.say(frame(DATA, END_STREAM, 1))
        await peer.hear_of(HEADERS)
        peer.say(
            frame(HEADERS, END_HEADERS, 7, encoder.encode({":path": "/x", "twice": "the same"})),
            frame(PING, 0, 0, b"12345678"),
        )
        await peer.hear_of(PING)
        assert peer.handlers[-1].fields[b"twice"] == b"the same"


async def test_the_same_header_block_says_what_the_table_holds_by_then() -> None:
    """It names an entry by its age: once the table changed it names another one, or none."""
    latest, forget = b"\xbe", b"\x20"
    blocks = [b"\x40\x01a\x01" + b"1", latest, latest, b"\x40\x01a\x01" + b"2", latest, latest]
    async with connected() as peer:
        for number, said in enumerate(blocks):
            peer.say(frame(HEADERS, END_HEADERS, 1 + 2 * number, said), frame(PING, 0, 0, b"12345678"))
            await peer.hear_of(PING)
        assert [handler.fields[b"a"] for handler in peer.handlers] == [b"1", b"1", b"1", b"2", b"2", b"2"]
        peer.say(frame(HEADERS, END_HEADERS, 21, forget + b"\x82"), frame(HEADERS, END_HEADERS, 23, latest))
        assert await peer.end() == Code.COMPRESSION_ERROR


async def test_a_connection_that_leaves_takes_no_new_streams() -> None:
    """Those there are go on to their ends."""
    async with connected() as peer:
        peer.say(frame(HEADERS, END_HEADERS, 1, block()), frame(PING, 0, 0, b"12345678"))
        await peer.hear_of(PING)
        (connection,) = peer.connections
        connection.leave()
        assert (await peer.hear_of(GOAWAY))[2] == struct.pack("!II", 1, 0)
        peer.say(frame(HEADERS, END_HEADERS, 3, block()), frame(DATA, 0, 3, b"lost"), frame(DATA, END_STREAM, 1, b"x"))
        assert await peer.hear_of(DATA) == (0, 1, b"x")
        async with asyncio.timeout(30):
            await peer.reader.read()
        assert len(peer.handlers) == 1


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Code.PROTOCOL_ERROR),
        (PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", Code.FRAME_SIZE_ERROR),
        (PREFACE + frame(DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR),
        (PREFACE + frame(HEADERS, END_HEADERS, 2, block()), Code.PROTOCOL_ERROR),
        (PREFACE + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff"), Code.COMPRESSION_ERROR),
        (PREFACE + frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, b"12345678"), Code.PROTOCOL_ERROR),
        (PREFACE + frame(CONTINUATION, END_HEADERS, 1, b""), Code.PROTOCOL_ERROR),
        (PREFACE + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, b"\0" * 16_000) * 5, Code.ENHANCE_YOUR_CALM),
        (PREFACE + frame(HEADERS, 0, 1, b"x") + frame(CONTINUATION, 0, 1), Code.ENHANCE_YOUR_CALM),
        (PREFACE + frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09x"), Code.PROTOCOL_ERROR),
        (PREFACE + frame(PUSH, 0, 1, b"1234"), Code.PROTOCOL_ERROR),
        (PREFACE + frame(PING, 0, 0, b"short"), Code.FRAME_SIZE_ERROR),
        (PREFACE + frame(SETTINGS, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
        (PREFACE + frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 2**31)), Code.FLOW_CONTROL_ERROR),
        (PREFACE + frame(WINDOW, 0, 0, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
        (PREFACE + frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"), Code.FLOW_CONTROL_ERROR),
        (PREFACE + frame(RESET, 0, 9, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
    ],
)
async def test_a_protocol_error_ends_the_connection(said: bytes, code: Code) -> None:
    """With the code that says how."""
    async with connected(hello=said) as peer:
        assert await peer.end() == code


async def test_more_than_is_read_at_once_comes_whole() -> None:
    """Frames of all lengths on several streams, of which reads end anywhere."""
    pieces = [bytes((number,)) * (1 + number * 61 % 16_384) for number in range(1, 200)]
    hello = (
        PREFACE + frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 2**24)) + frame(WINDOW, 0, 0, struct.pack("!I", 2**24))
    )
    async with connected(hello=hello) as peer:
        for stream in (1, 3):
            peer.say(frame(HEADERS, END_HEADERS, stream, block()))
        peer.say(*[frame(DATA, 0, 1 + 2 * (len(piece) % 2), piece) for piece in pieces])
        for piece in pieces:
            assert await peer.hear_of(DATA) == (0, 1 + 2 * (len(piece) % 2), piece)


async def test_more_than_a_window_ends_the_connection() -> None:
    """The peer counts wrongly, or means harm."""
    async with connected(hello=PREFACE + frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 0))) as peer:
        peer.say(frame(HEADERS, END_HEADERS, 1, block()), *[frame(DATA, 0, 1, b"x" * 16_384)] * 65)
        assert await peer.end() == Code.FLOW_CONTROL_ERROR
