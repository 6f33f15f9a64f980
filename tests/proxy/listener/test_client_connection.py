"""The client of a request as plain calls (kvproxy.base.types.ClientConnection), told byte by byte what ASGI would
say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvproxy.base.types import CONNECTION, ClientConnection
from kvproxy.proxy.listener.server import serve
from tests.proxy.listener.client import body_of, connect, opened

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTH_2 = [(b"content-length", b"2")]
STREAM = [(b"content-type", b"text/event-stream")]


def post(body: bytes, *extra: bytes) -> bytes:
    lines = [b"POST /a HTTP/1.1", b"host: x", *extra, b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


def answering(*calls: Callable[[ClientConnection], None]) -> Any:
    """Return an app that answers with these calls."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for call in calls:
            call(scope[CONNECTION])

    return app


async def test_a_body_that_arrived_is_taken_once() -> None:
    """Whole, without a receive; what receive() says after it is the client's leaving."""
    taken: list[bytes | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client = scope[CONNECTION]
        taken.extend((client.take_body(), client.take_body()))
        client.start(200, LENGTH_2, b"ok", more=False)
        taken.append((await receive())["type"].encode())

    async with serve(app) as url, connect(url) as client:
        for body in (b"hello", b"x" * 100_000, b""):
            await client.send(post(body))
            assert (await client.response())[1] == b"ok"
    assert taken[:3] == [b"hello", None, b"http.disconnect"]
    assert taken[6:] == [b"", None, b"http.disconnect"]


async def test_a_body_on_its_way_is_received() -> None:
    """take_body() takes nothing of it, and nothing after receive() had it."""
    begun = asyncio.Event()
    seen: list[bytes | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client = scope[CONNECTION]
        seen.append(client.take_body())
        begun.set()
        seen.append(await body_of(receive))
        seen.append(client.take_body())
        client.start(200, LENGTH_2, b"ok", more=False)

    async with serve(app) as url, connect(url) as client:
        raw = post(b"hello")
        await client.send(raw[:-3])
        await begun.wait()
        await client.send(raw[-3:])
        assert (await client.response())[1] == b"ok"
    assert seen == [None, b"hello", None]


async def test_a_chunked_body_is_taken_as_one() -> None:
    """Without its framing."""
    taken: list[bytes | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        taken.append(scope[CONNECTION].take_body())
        scope[CONNECTION].start(200, LENGTH_2, b"ok", more=False)

    async with serve(app) as url, connect(url) as client:
        await client.send(
            b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
        )
        await client.response()
    assert taken == [b"abc"]


async def test_head_and_first_piece_are_one_packet() -> None:
    """And the rest follows, chunked where no length was stated."""
    app = answering(
        lambda client: client.start(200, STREAM, b"one", more=True),
        lambda client: client.write(b"two", more=True),
        lambda client: client.write(b"", more=False),
    )
    async with serve(app) as url, connect(url) as client:
        for _ in range(2):
            await client.send(GET)
            head = await client.head()
            assert head.startswith(b"http/1.1 200 ok\r\ncontent-type: text/event-stream\r\n")
            assert b"transfer-encoding: chunked" in head
            assert await client.reader.readexactly(21) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [100, 100_000, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_large_first_piece_arrives_whole(size: int, chunked: bool) -> None:
    """Framed as a small one is."""
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    headers = [] if chunked else [(b"content-length", b"%d" % len(body))]
    async with (
        serve(answering(lambda client: client.start(200, headers, body, more=False))) as url,
        connect(url) as client,
    ):
        await client.send(GET)
        await client.head()
        if chunked:
            assert int(await client.reader.readline(), 16) == len(body)
        assert await client.reader.readexactly(len(body)) == body
        if chunked:
            assert await client.reader.readexactly(7) == b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("raw", [b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", GET])
async def test_no_body_where_none_may_be(raw: bytes) -> None:
    """HEAD, and a status that has none."""
    status = 200 if raw.startswith(b"HEAD") else 304
    app = answering(lambda client: client.start(status, LENGTH_2, b"ok", more=False))
    async with serve(app) as url, connect(url) as client:
        await client.send(raw + raw)
        assert b"\r\ncontent-length: 2\r\n" in await client.head()
        assert (await client.head()).startswith(b"http/1.1 %d" % status)


async def test_an_old_client_gets_the_close_as_the_end() -> None:
    """HTTP/1.0 knows no chunks."""
    app = answering(lambda client: client.start(200, STREAM, b"one", more=False))
    async with serve(app) as url, connect(url) as client:
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert body == b"one"


@pytest.mark.parametrize(
    "calls",
    [
        [lambda client: client.write(b"x", more=False)],
        [lambda client: client.start(200, [(b"a", b"b\r\nc: d")], b"", more=False)],
        [lambda client: client.start(200, [(b"a b", b"c")], b"", more=False)],
    ],
    ids=["no head", "value", "name"],
)
async def test_a_broken_rule_gets_500(calls: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of what the app said goes out."""
    with caplog.at_level(logging.CRITICAL):
        async with serve(answering(*calls)) as url, connect(url) as client:
            await client.send(GET)
            assert (await client.rest()).startswith(b"HTTP/1.1 500")


@pytest.mark.parametrize(
    "calls",
    [
        [lambda client: client.start(200, LENGTH_2, b"abc", more=False)],
        [lambda client: client.start(200, LENGTH_2, b"a", more=False)],
        [lambda client: client.start(200, LENGTH_2, b"a", more=True), lambda client: client.write(b"bc", more=False)],
        [lambda client: client.start(200, [], b"a", more=True), lambda client: client.start(200, [], b"", more=False)],
    ],
    ids=["longer", "shorter", "later", "twice"],
)
async def test_a_wrong_length_breaks_the_connection(calls: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A client must not take a wrong response for a whole one, nor its rest for the next."""
    with caplog.at_level(logging.CRITICAL):
        async with serve(answering(*calls)) as url, connect(url) as client:
            await client.send(GET + GET)
            assert (await client.rest()).count(b"HTTP/1.1") <= 1


async def test_after_the_end_nothing_may_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """The response is complete for its client: the connection's next one is not spoilt."""
    app = answering(
        lambda client: client.start(200, LENGTH_2, b"ok", more=False),
        lambda client: client.write(b"x", more=False),
    )
    with caplog.at_level(logging.CRITICAL):
        async with serve(app) as url, connect(url) as client:
            await client.send(GET)
            for _ in range(2):
                assert (await client.response())[1] == b"ok"
                await client.send(GET)


@pytest.mark.parametrize("late", [False, True])
async def test_leaving_calls_back(late: bool) -> None:
    """Also shown to a callback that comes after the client left; then all calls do nothing."""
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client = scope[CONNECTION]
        client.start(200, STREAM, b"x", more=True)
        if late:
            while (await receive())["type"] != "http.disconnect":
                pass
        client.on_disconnect = left.set
        if client.disconnected:
            left.set()
        await left.wait()
        assert client.writable
        await client.drain()
        client.write(b"y", more=True)
        client.start(200, STREAM, b"x", more=True)

    async with serve(app) as url:
        client = await opened(url)
        await client.send(GET)
        await client.head()
        client.writer.close()
        async with asyncio.timeout(60):
            await left.wait()


async def test_a_callback_taken_back_is_not_called() -> None:
    """Nor is one whose response is complete."""
    called: list[str] = []
    over = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client = scope[CONNECTION]
        client.on_disconnect = lambda: called.append("taken back")
        client.on_disconnect = None
        client.start(200, LENGTH_2, b"ok", more=False)
        client.on_disconnect = lambda: called.append("complete")
        over.set()

    async with serve(app) as url, connect(url) as client:
        await client.send(GET)
        await client.response()
        await over.wait()
    assert called == []


async def test_a_slow_reader_is_waited_for() -> None:
    """`writable` says when to await `drain`, so that memory stays bounded."""
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        client = scope[CONNECTION]
        client.start(200, STREAM, more=True)
        for _ in range(512):
            if not client.writable:
                await client.drain()
            client.write(b"x" * 65536, more=True)
            sent += 65536
        client.write(b"", more=False)

    async with serve(app) as url, connect(url) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET)
        before = -1
        while sent != before or not sent:
            before = sent
            await asyncio.sleep(0.03)
        assert sent < 16 * 1024 * 1024
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        while not (await client.reader.read(1 << 20)).endswith(b"\r\n0\r\n\r\n"):
            pass
        assert sent == 512 * 65536


async def test_a_waiting_writer_learns_that_the_client_left() -> None:
    """drain() returns, and what is written then goes nowhere."""
    drained = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client = scope[CONNECTION]
        client.start(200, STREAM, more=True)
        while client.writable:
            client.write(b"x" * 65536, more=True)
        await client.drain()
        client.write(b"x", more=True)
        drained.set()

    async with serve(app) as url:
        client = await opened(url)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET)
        await asyncio.sleep(0.01)
        client.writer.transport.abort()
        async with asyncio.timeout(60):
            await drained.wait()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()
