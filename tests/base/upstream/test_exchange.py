"""One request and its response on the wire: streaming, slowness, silence, and ends that come too early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.base.errors import (
    FirstByteTimeout,
    IdleTimeout,
    UnsafeRequest,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamProtocolError,
)
from kvproxy.base.upstream.connection import Connection
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.base.upstream.request import WireRequest
from tests.base.upstream.calls import HEAD_ONLY, OK, PATIENT, fetch, pieces, post, read, until
from tests.support.examples import examples
from tests.support.loop_time import ASYNCIO_ONLY, skipping_time
from tests.support.scripted import Peer, Script, answer, scripted


def say(*data: bytes, then_gone: bool = True) -> Script:
    """Read one request, send these pieces, and stay until the proxy closes (or close itself)."""

    async def script(peer: Peer) -> None:
        await peer.request()
        for piece in data:
            await peer.send(piece)
        if then_gone:
            await peer.gone()

    return script


async def test_the_head_comes_before_the_body() -> None:
    """request() returns on the head; the body is waited for piece by piece."""
    more = asyncio.Event()

    async def stream(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 201 Made\r\nX-Thing: 1\r\ntransfer-encoding: chunked\r\n\r\n")
        await more.wait()
        await peer.send(b"3\r\nabc\r\n")
        await peer.send(b"3\r\ndef\r\n0\r\n\r\n")
        await peer.gone()

    async with scripted(stream) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin)
        assert response.status == 201
        assert response.headers == [(b"x-thing", b"1"), (b"transfer-encoding", b"chunked")]
        assert response.take() is None
        assert not response.complete
        more.set()
        assert await read(response) == b"abcdef"
        assert response.complete
        assert response.take() == b""
        assert await response.next_chunk() == b""


async def test_pieces_that_arrived_together_are_taken_together() -> None:
    """A burst of chunks is one bytes object, so that it costs one write downstream."""
    burst = b"".join(b"4\r\n%04d\r\n" % n for n in range(64))
    async with scripted(say(HEAD_ONLY + burst)) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin)
        await until(lambda: response._source is not None and response._source.reading.buffered_bytes > 0)  # type: ignore[attr-defined]
        assert response.take() == b"".join(b"%04d" % n for n in range(64))
        assert response.take() is None
        response.abort()


@ASYNCIO_ONLY
async def test_a_slow_reader_stops_the_engine() -> None:
    """Memory stays bounded: reading pauses above the high-water mark and goes on when it was taken."""
    sent = 0
    size = 64 * 1024 * 1024

    async def flood(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            await peer.send(b"x" * 65536)
            sent += 65536
        await peer.gone()

    with skipping_time() as skip:
        async with scripted(flood) as upstream, UpstreamPool(high_water_bytes=128 * 1024) as pool:
            response = await post(pool, upstream.origin, timeouts=Timeouts(first_byte_s=60, idle_s=20))
            before = -1
            while sent != before or sent < 128 * 1024:  # until the engine stands still
                before = sent
                await asyncio.sleep(0.03)
            await skip(30.0)  # longer than idle_s: the silence is the reader's, not the engine's
            assert sent < size // 2
            held = response.take()
            assert held is not None
            assert len(held) < 128 * 1024 + 512 * 1024
            total = len(held)
            while data := await response.next_chunk():
                total += len(data)
            assert total == size
            assert pool.idle == 1  # back although reading had been paused on it


async def test_silence_before_the_first_byte() -> None:
    """first_byte_s runs until the first BODY byte, so an early head does not stop it."""
    quick = Timeouts(connect_s=60, first_byte_s=0.03, idle_s=60)
    after_the_head = Timeouts(connect_s=60, first_byte_s=1, idle_s=60)
    async with scripted(say(), say(HEAD_ONLY)) as upstream, UpstreamPool() as pool:
        with pytest.raises(FirstByteTimeout):
            await post(pool, upstream.origin, timeouts=quick)
        response = await post(pool, upstream.origin, timeouts=after_the_head)
        with pytest.raises(FirstByteTimeout):
            await response.next_chunk()
        with pytest.raises(FirstByteTimeout):
            response.take()
        await until(lambda: pool.open == 0)


async def test_silence_in_the_middle() -> None:
    """idle_s bounds every pause of a stream; what came before it is still delivered."""
    async with scripted(say(HEAD_ONLY + b"3\r\nabc\r\n")) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin, timeouts=Timeouts(first_byte_s=60, idle_s=0.03))
        await until(lambda: pool.open == 0)
        assert response.take() == b"abc"
        with pytest.raises(IdleTimeout):
            await response.next_chunk()


async def test_silence_after_a_slow_reader_is_the_engines_again() -> None:
    """Once the reader has taken what stopped the reading, idle_s runs as before."""
    body = HEAD_ONLY + b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    async with scripted(say(body)) as upstream, UpstreamPool(high_water_bytes=1024) as pool:
        response = await post(pool, upstream.origin, timeouts=Timeouts(first_byte_s=60, idle_s=0.1))
        async with asyncio.timeout(30):
            taken = 0
            while taken < 0x10000:
                taken += len(await response.next_chunk())
            with pytest.raises(IdleTimeout):
                await response.next_chunk()


async def test_zero_is_no_timeout() -> None:
    """0 switches each of them off."""
    go = asyncio.Event()

    async def slow(peer: Peer) -> None:
        await peer.request()
        await go.wait()
        await peer.send(HEAD_ONLY + b"1\r\na\r\n")
        await asyncio.sleep(0.02)
        await peer.send(b"0\r\n\r\n")
        await peer.gone()

    async with scripted(slow) as upstream, UpstreamPool() as pool:
        request = asyncio.create_task(fetch(pool, upstream.origin, timeouts=Timeouts(0, 0, 0)))
        await until(lambda: bool(upstream.peers and upstream.peers[0].requests))
        go.set()
        assert await request == b"a"


async def test_abort_reaches_the_engine_at_once() -> None:
    """The socket is closed, the slot is free, and reading on is an error."""
    gone = asyncio.Event()

    async def stream(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD_ONLY + b"3\r\nabc\r\n")
        await peer.gone()
        gone.set()

    async with scripted(stream) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin)
        assert await response.next_chunk() == b"abc"
        response.abort()
        response.abort()
        async with asyncio.timeout(60):
            await gone.wait()
        assert pool.open == 0
        with pytest.raises(UpstreamDisconnected):
            await response.next_chunk()


async def test_cancelling_a_request_reaches_the_engine() -> None:
    """A client that leaves before the head frees the engine as well."""
    gone = asyncio.Event()

    async def silent(peer: Peer) -> None:
        await peer.request()
        await peer.gone()
        gone.set()

    async with scripted(silent) as upstream, UpstreamPool() as pool:
        request = asyncio.create_task(post(pool, upstream.origin))
        await until(lambda: bool(upstream.peers and upstream.peers[0].requests))
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        async with asyncio.timeout(60):
            await gone.wait()
        await until(lambda: pool.open == 0)


async def test_a_cancelled_read_may_be_tried_again() -> None:
    """Waiting for a piece with a time limit loses no byte."""
    more = asyncio.Event()

    async def stream(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD_ONLY)
        await more.wait()
        await peer.send(b"3\r\nabc\r\n0\r\n\r\n")
        await peer.gone()

    async with scripted(stream) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await response.next_chunk()
        more.set()
        assert await read(response) == b"abc"


@pytest.mark.parametrize(
    ("raw", "more", "error"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", b"", UpstreamDisconnected),
        (HEAD_ONLY + b"3\r\nabc\r\n", b"", UpstreamDisconnected),
        (HEAD_ONLY + b"3\r\nabc\r\n", b"zz\r\n", UpstreamProtocolError),
    ],
)
async def test_a_death_in_the_body_is_told_after_what_came(raw: bytes, more: bytes, error: type[UpstreamError]) -> None:
    """Bytes that arrived are delivered, then the reason: nothing is lost and nothing looks complete."""
    go_on = asyncio.Event()

    async def dies(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw)
        await go_on.wait()
        await peer.send(more)

    async with scripted(dies) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin)
        go_on.set()
        await until(lambda: pool.open == 0)
        assert response.take() == b"abc"
        assert not response.complete
        with pytest.raises(error):
            await response.next_chunk()


async def test_a_reset_in_the_body_is_a_disconnect() -> None:
    """RST as well as FIN."""

    async def resets(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD_ONLY)
        await asyncio.sleep(0.01)
        peer.reset()

    async with scripted(resets) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin)
        with pytest.raises(UpstreamDisconnected):
            await response.next_chunk()


async def test_a_body_without_length_ends_at_the_close() -> None:
    """HTTP/1.0 style; the connection is not kept."""
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nabc"
    async with scripted(say(raw, then_gone=False)) as upstream, UpstreamPool() as pool:
        assert await fetch(pool, upstream.origin) == b"abc"
        await until(lambda: pool.open == 0)


async def test_a_reset_is_no_end_of_a_body_without_length() -> None:
    """Only a clean close completes it: a cut answer must not pass for a whole one."""

    async def resets(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await asyncio.sleep(0.01)
        peer.reset()

    async with scripted(resets) as upstream, UpstreamPool() as pool:
        with pytest.raises(UpstreamDisconnected):
            await fetch(pool, upstream.origin)


@pytest.mark.parametrize(
    ("raw", "method", "status", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"HEAD", 200, True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"POST", 204, True),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", b"GET", 304, True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\na: b\r\n\r\n" + OK, b"POST", 200, True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", b"POST", 200, False),
        (OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"POST", 200, False),
    ],
    ids=["HEAD", "204", "304", "interim", "close", "a second response"],
)
async def test_entries_kept_afterwards(raw: bytes, method: bytes, status: int, kept: bool) -> None:
    """A connection is reused at a message boundary only."""
    async with scripted(say(raw)) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin, None, method=method)
        assert response.status == status
        body = await read(response)
        assert body == (b"ok" if b"ok" in raw and method == b"POST" else b"")
        assert pool.idle == (1 if kept else 0)


async def test_an_iterated_body_goes_out_chunked() -> None:
    """Its length is not known before its end; empty pieces are not the end."""
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        assert await fetch(pool, upstream.origin, pieces(b"abc", b"", b"defg")) == b"ok"
        request = upstream.peers[0].requests[0]
        assert b"\r\ntransfer-encoding: chunked\r\n" in request
        assert request.endswith(b"\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
        assert await fetch(pool, upstream.origin, pieces(b"x")) == b"ok"
        assert len(upstream.peers) == 1


async def test_an_iterated_body_of_stated_length_goes_out_plain() -> None:
    """The caller's content-length stands, and is held against what was really sent."""
    length = [(b"content-length", b"7")]
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        await read(await post(pool, upstream.origin, pieces(b"abc", b"defg"), headers=length))
        assert upstream.peers[0].requests[0].endswith(b"\r\n\r\nabcdefg")
        for body in (pieces(b"abc"), pieces(b"abcdefgh")):
            with pytest.raises(UnsafeRequest):
                await post(pool, upstream.origin, body, headers=length)
        await until(lambda: pool.open == 0)


@pytest.mark.parametrize("body", [b"abc", b""])
async def test_bytes_may_be_sent_chunked(body: bytes) -> None:
    """When the caller's headers say so."""
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        await read(await post(pool, upstream.origin, body, headers=[(b"transfer-encoding", b"chunked")]))
        expected = b"3\r\nabc\r\n0\r\n\r\n" if body else b"0\r\n\r\n"
        assert upstream.peers[0].requests[0].endswith(b"\r\n\r\n" + expected)


class InstantEngine(asyncio.Transport):
    """Answers in the loop's next turn, before the done callback of an upload can run."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._body = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._body += data
        if self._body.endswith(b"hello"):
            self._body = b""
            asyncio.get_running_loop().call_soon(self._connection.data_received, OK)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)


class InstantPool(UpstreamPool):
    """Its connections lead to instant engines."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    async def _open_connection(self, origin: Origin, timeout_s: float) -> Connection:
        connection = Connection(loop=asyncio.get_running_loop(), high_water_bytes=1024)
        connection.connection_made(InstantEngine(connection))
        self.opened += 1
        return connection


async def test_a_connection_is_kept_after_a_streamed_body() -> None:
    """Also when the answer comes right behind the body's last piece; such a request must not cost a connection."""
    pool = InstantPool()
    async with pool:
        for _ in range(3):
            response = await post(pool, Origin("http", "x", 1), pieces(b"hello"), headers=[(b"content-length", b"5")])
            assert await read(response) == b"ok"
        assert (pool.opened, pool.idle) == (1, 1)


async def test_an_early_answer_comes_while_the_body_still_goes_up() -> None:
    """Refusals (413, 401) are not held back; the half-sent connection is never reused."""
    never = asyncio.Event()

    async def refuses(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await peer.gone()

    async with scripted(refuses) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin, pieces(b"abc", then=never))
        assert (response.status, await read(response)) == (413, b"no")
        assert pool.idle == 0
        await until(lambda: pool.open == 0)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "upstream upload"]


async def test_an_early_answer_to_bytes_still_in_the_buffer() -> None:
    """The rest of the body would be read as the next request."""

    async def refuses(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.sleep(0.02)

    async with scripted(refuses) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin, b"x" * (32 * 1024 * 1024))
        assert (response.status, await read(response)) == (413, b"no")
        assert pool.idle == 0


async def test_an_upload_waits_for_a_slow_engine() -> None:
    """Memory stays bounded on the way up too."""
    read_on = asyncio.Event()
    made = 0

    async def many() -> AsyncIterator[bytes]:
        nonlocal made
        for _ in range(1024):
            made += 65536
            yield b"x" * 65536

    async def slow(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.writer.transport.pause_reading()
        await read_on.wait()
        peer.writer.transport.resume_reading()
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            tail = tail[-4:] + await peer.reader.read(1 << 20)
        await peer.send(OK)
        await peer.gone()

    async with scripted(slow) as upstream, UpstreamPool() as pool:
        request = asyncio.create_task(fetch(pool, upstream.origin, many()))
        before = -1
        while made != before or not made:
            before = made
            await asyncio.sleep(0.02)
        assert made < 32 * 1024 * 1024
        read_on.set()
        assert await request == b"ok"
        assert made == 64 * 1024 * 1024


async def test_an_engine_that_takes_no_body_times_out() -> None:
    """The first-byte timeout also bounds how long a write may stand still."""

    async def many() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    async def deaf(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.writer.transport.pause_reading()
        await asyncio.Event().wait()

    async with scripted(deaf) as upstream, UpstreamPool() as pool:
        with pytest.raises(FirstByteTimeout):
            await post(pool, upstream.origin, many(), timeouts=Timeouts(first_byte_s=0.05))


@ASYNCIO_ONLY
async def test_silence_after_the_upload_times_out() -> None:
    """The first-byte timeout starts when the body was sent, not while a slow client still sends it."""
    with skipping_time() as skip:

        async def slow_client() -> AsyncIterator[bytes]:
            yield b"a"
            await skip(30.0)
            yield b"b"

        async with scripted(say()) as upstream, UpstreamPool() as pool:
            asking = asyncio.create_task(
                post(pool, upstream.origin, slow_client(), timeouts=Timeouts(first_byte_s=20.0))
            )
            await until(lambda: bool(upstream.peers and upstream.peers[0].requests))
            assert upstream.peers[0].requests[0].endswith(b"1\r\nb\r\n0\r\n\r\n")
            assert not asking.done()
            await skip(30.0)
            with pytest.raises(FirstByteTimeout):
                await asking


async def test_an_engine_that_dies_during_the_upload() -> None:
    """The upload ends with it."""
    async with scripted(say_and_reset) as upstream, UpstreamPool() as pool:
        with pytest.raises(UpstreamDisconnected):
            await post(pool, upstream.origin, pieces(b"a", then=asyncio.Event()))
        await until(lambda: pool.open == 0)


async def say_and_reset(peer: Peer) -> None:
    """Read the head, then reset."""
    await peer.reader.readuntil(b"\r\n\r\n")
    peer.reset()


async def test_an_error_of_the_body_is_the_requests_error() -> None:
    """An exception of the caller's own iterator comes back to the caller; the engine sees a closed connection."""

    class ClientLeft(Exception):
        pass

    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise ClientLeft

    async with scripted(say()) as upstream, UpstreamPool() as pool:
        with pytest.raises(ClientLeft):
            await post(pool, upstream.origin, broken())
        await until(lambda: pool.open == 0)


async def test_a_body_that_is_cancelled_fails_the_request() -> None:
    """An iterator cancelled from elsewhere leaves no task waiting."""

    async def cancelled() -> AsyncIterator[bytes]:
        yield b"a"
        raise asyncio.CancelledError

    async with scripted(say()) as upstream, UpstreamPool() as pool:
        with pytest.raises(UpstreamDisconnected):
            await post(pool, upstream.origin, cancelled())


async def test_a_half_closed_engine_is_a_disconnect() -> None:
    """It shut its sending side: no response will come."""

    async def half_closes(peer: Peer) -> None:
        await peer.request()
        peer.writer.write_eof()
        await peer.gone()

    async with scripted(half_closes) as upstream, UpstreamPool() as pool:
        with pytest.raises(UpstreamDisconnected, match="without a response"):
            await post(pool, upstream.origin)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", HEAD_ONLY, OK, b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"]),
    tail=st.binary(max_size=60),
)
def test_garbage_never_hangs_nor_poisons(raw: bytes, tail: bytes) -> None:
    """Whatever an engine says before it closes, the caller gets a response or one of our errors, and the next request
    gets its own answer."""

    async def scenario() -> None:
        async with scripted(say(raw + tail, then_gone=False), answer(OK)) as upstream, UpstreamPool() as pool:
            async with asyncio.timeout(60):
                try:
                    await fetch(pool, upstream.origin, timeouts=PATIENT)
                except UpstreamError:
                    assert not pool.idle
                assert await fetch(pool, upstream.origin) == b"ok"

    asyncio.run(scenario())


class Flood(asyncio.Transport):
    """Hands over as much as is read, as uvloop does: one full read after another in the same turn of the loop."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None: ...

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...

    def pour(self, piece: bytes, count: int) -> int:
        """How many of so many pieces were read."""
        poured = 0
        while self.reading and poured < count:
            self._connection.data_received(piece)
            poured += 1
        return poured


@pytest.mark.parametrize(("size_bytes", "in_a_turn"), [(100_000, 1), (1000, 20)])
async def test_a_flood_is_passed_on_one_full_read_a_turn(size_bytes: int, in_a_turn: int) -> None:
    """Else an engine that sends faster than the proxy reads holds up every other stream, 80 ms for 6 MB of tiny
    chunks."""
    connection = Connection(loop=asyncio.get_running_loop(), high_water_bytes=1 << 20)
    engine = Flood(connection)
    connection.connection_made(engine)
    taken: list[bytes] = []
    response = connection.send(WireRequest(b"GET", (b"GET / HTTP/1.1\r\n\r\n",), None, 0), Timeouts())
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
    response.take()

    def pass_on(piece: bytes) -> bool:
        taken.append(piece)
        return True

    response.on_piece = pass_on
    waiting = asyncio.ensure_future(response.changed())
    await asyncio.sleep(0)
    piece = b"x" * size_bytes
    for turn in range(1, 4):
        assert engine.pour(b"%x\r\n%b\r\n" % (size_bytes, piece), 20) == in_a_turn
        assert taken == [piece] * (turn * in_a_turn)
        await asyncio.sleep(0)
    waiting.cancel()
