"""A client's view of the listener, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvproxy.base.errors import ConfigError
from kvproxy.proxy.listener.parser import ListenerLimits
from kvproxy.proxy.listener.protocol import ClientProtocol
from kvproxy.proxy.listener.server import UVICORN, require_uvicorn, serve
from tests.proxy.listener.client import body_of, connect, echo, opened
from tests.support.loop_time import ASYNCIO_ONLY, skipping_time

GET = b"GET /a?b=c HTTP/1.1\r\nhost: x\r\n\r\n"


def post(body: bytes, *extra: bytes) -> bytes:
    lines = [b"POST /a HTTP/1.1", b"host: x", *extra, b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


async def test_requests_in_a_row_on_one_connection() -> None:
    """Keep-alive, with and without a body."""
    async with serve(echo) as url, connect(url) as client:
        for _ in range(3):
            await client.send(post(b"hello"))
            assert (await client.response())[1] == b"POST /a? hello"
            await client.send(GET)
            assert (await client.response())[1] == b"GET /a?b=c "


async def test_pipelined_requests_are_answered_in_order() -> None:
    """All at once in, one after another out."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(b"".join(post(b"%d" % n) for n in range(5)))
        assert [(await client.response())[1][-1:] for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_head_split_anywhere_is_read() -> None:
    """The network cuts where it likes."""
    raw = post(b"hello")
    async with serve(echo) as url, connect(url) as client:
        for cut in range(1, len(raw), 7):
            await client.send(raw[:cut])
            await asyncio.sleep(0)
            await client.send(raw[cut:])
            assert (await client.response())[1].endswith(b"hello")


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """Three pieces without a length."""
    await body_of(receive)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for piece in (b"one", b"", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


async def test_no_length_is_chunked() -> None:
    """HTTP/1.1: the end of the stream is visible, and the connection goes on."""
    async with serve(stream) as url, connect(url) as client:
        for _ in range(2):
            await client.send(GET)
            assert b"transfer-encoding: chunked\r\n" in await client.head()
            assert await client.reader.readexactly(21) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_an_old_client_gets_no_chunks() -> None:
    """HTTP/1.0 knows none: the close is the end."""
    async with serve(stream) as url, connect(url) as client:
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert b"connection: close" in head
        assert body == b"onetwo"


@pytest.mark.parametrize("app", [echo, stream])
async def test_head_has_no_body(app: Any) -> None:
    """The headers of GET, and nothing after them."""
    async with serve(app) as url, connect(url) as client:
        await client.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
        head = await client.head()
        assert head.startswith(b"http/1.1 200")
        assert (await client.reader.readexactly(9)).lower() == b"http/1.1 "


@pytest.mark.parametrize("status", [204, 304])
async def test_bodiless_statuses(status: int) -> None:
    """No chunks after 204, and a 304 may state the length it does not send."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"7")] if status == 304 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body"})

    async with serve(app) as url, connect(url) as client:
        await client.send(GET + GET)
        assert b"chunked" not in await client.head()
        assert (await client.head()).startswith(b"http/1.1 %d" % status)


async def test_expect_100_continue() -> None:
    """The interim answer is sent once the app wants the body, not before."""
    wanted = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await wanted.wait()
        await echo(scope, receive, send)

    async with serve(app) as url, connect(url) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await client.reader.read(1)
        wanted.set()
        assert (await client.head()).startswith(b"http/1.1 100")
        await client.send(b"ok")
        assert (await client.response())[1].endswith(b"ok")


async def test_an_answer_instead_of_100_continue_ends_the_connection() -> None:
    """The client may send the body now or not, so what comes next could be either."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with serve(refuse) as url, connect(url) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert b"connection: close" in await client.head()
        assert await client.reader.read() == b""


async def refuse_unread(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize(
    "framing", [b"content-length: 3000000", b"transfer-encoding: chunked"], ids=["3 MB", "unknown length"]
)
async def test_an_early_answer_to_a_long_body_announces_the_close(framing: bytes) -> None:
    """A client that is not told would send its next request on a connection that is about to be closed."""
    async with serve(refuse_unread) as url, connect(url) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n")
        assert b"connection: close" in await client.head()


async def test_an_early_answer_to_a_short_body_keeps_the_connection() -> None:
    """The rest of the body is dropped, and the next request is answered."""
    async with serve(refuse_unread) as url, connect(url) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        assert b"connection: close" not in await client.head()
        await client.send(b"x" * 100_000 + GET)
        assert (await client.head()).startswith(b"http/1.1 401")


async def test_head_and_body_arrive_together() -> None:
    """One write, and so one packet, for a short response."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(GET)
        first = await client.reader.read(65536)
        assert first.endswith(b"\r\n\r\nGET /a?b=c ")


async def test_a_head_does_not_wait_for_its_body() -> None:
    """A client sees the status while the first token is still being computed."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go.wait()
        await send({"type": "http.response.body", "body": b"late"})

    async with serve(app) as url, connect(url) as client:
        await client.send(GET)
        assert (await client.head()).startswith(b"http/1.1 200")
        go.set()
        assert await client.reader.readexactly(14) == b"4\r\nlate\r\n0\r\n\r\n"


async def test_a_client_that_leaves_is_noticed_at_once() -> None:
    """receive() says so while the app waits for something else; a half-closed client counts as gone."""
    for half in (False, True):
        seen: list[str] = []
        done = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any, seen: list[str] = seen, done: asyncio.Event = done) -> None:
            await body_of(receive)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            seen.append((await receive())["type"])
            await send({"type": "http.response.body", "body": b"y"})  # goes nowhere, without an error
            done.set()

        async with serve(app) as url, connect(url) as client:
            await client.send(post(b"hello"))
            await client.head()
            if half:
                client.writer.write_eof()
            else:
                client.writer.close()
            async with asyncio.timeout(60):
                await done.wait()
            assert seen == ["http.disconnect"]


async def test_a_client_that_leaves_takes_its_pipelined_requests_along() -> None:
    """The running one is told, the queued ones never start."""
    started = 0
    running, told = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal started
        started += 1
        running.set()
        await body_of(receive)
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    async with serve(app, drain_s=0.02) as url:
        client = await opened(url)
        await client.send(GET + GET + GET)
        async with asyncio.timeout(60):
            await running.wait()
        client.writer.close()  # unseen while requests are queued, since reading is paused then: cut by the drain
    assert started == 1
    assert told.is_set()


async def test_a_slow_reader_stops_the_app() -> None:
    """send() waits once the transport is full, so memory stays bounded."""
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(512):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent += 65536
        await send({"type": "http.response.body"})

    async with serve(app) as url, connect(url) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET)
        before = -1
        while sent != before or not sent:
            before = sent
            await asyncio.sleep(0.03)
        assert sent < 16 * 1024 * 1024
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        total = 0
        while not (data := await client.reader.read(1 << 20)).endswith(b"\r\n0\r\n\r\n"):
            total += len(data)
        assert sent == 512 * 65536


async def test_a_client_that_takes_nothing_is_cut() -> None:
    """A stalled reader does not hold an engine for ever."""
    told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(512):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    async with serve(app, limits=ListenerLimits(stall_timeout_s=0.05)) as url, connect(url) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET)
        async with asyncio.timeout(60):
            await told.wait()


async def test_a_client_that_takes_again_is_not_cut_later() -> None:
    """Its connection outlives that of a client that stalls after it, by the same limit."""
    told = {b"/slow": asyncio.Event(), b"/stalled": asyncio.Event()}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["raw_path"] in told:
            for _ in range(512):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            told[scope["raw_path"]].set()
        await send({"type": "http.response.body", "body": b"end"})

    async with (
        serve(app, limits=ListenerLimits(stall_timeout_s=1.0)) as url,
        connect(url) as slow,
        connect(url) as stalled,
        asyncio.timeout(60),
    ):
        await slow.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        while not (await slow.reader.read(1 << 20)).endswith(b"\r\n3\r\nend\r\n0\r\n\r\n"):
            pass
        stalled.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await stalled.send(b"GET /stalled HTTP/1.1\r\nhost: x\r\n\r\n")
        await told[b"/stalled"].wait()
        await slow.send(GET)
        assert (await slow.reader.readuntil(b"0\r\n\r\n")).endswith(b"\r\n\r\n3\r\nend\r\n0\r\n\r\n")


async def test_a_slow_app_stops_the_upload() -> None:
    """The request body is not collected beyond a bound before the app reads it."""
    go = asyncio.Event()
    held = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal held
        await go.wait()
        held = len((await receive())["body"])
        await echo_length(scope, receive, send)

    async def echo_length(scope: Any, receive: Any, send: Any) -> None:
        text = b"%d" % (held + len(await body_of(receive)))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
        await send({"type": "http.response.body", "body": text})

    size = 16 * 1024 * 1024
    async with serve(app) as url, connect(url) as client:
        sending = asyncio.create_task(client.send(post(b"x" * size)))
        await asyncio.sleep(0.05)
        go.set()
        await sending
        assert (await client.response())[1] == b"%d" % size
        assert held < 2 * 1024 * 1024


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_garbage_gets_400_and_the_end(raw: bytes) -> None:
    """In OpenAI's error shape; ambiguous framing is never guessed at."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(raw)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in head
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")


async def test_a_client_of_http2_is_named_the_version_to_use() -> None:
    """By prior knowledge; an offer to upgrade is served as HTTP/1.1."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        _, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert json.loads(body)["error"]["message"] == "HTTP/2 is not spoken here: use HTTP/1.1"


async def test_garbage_behind_a_request_does_not_corrupt_its_response() -> None:
    """With a response on its way the connection is cut, instead of a second head in the middle of it."""
    head_out = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        head_out.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serve(app) as url, connect(url) as client:
        await client.send(GET)
        await head_out.wait()
        await client.send(b"\0\0\0")
        assert b"400" not in await client.rest()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 3000 + b"\r\n\r\n",
        b"GET /" + b"b" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 3000,
    ],
    ids=["header", "target", "count", "unfinished"],
)
async def test_a_large_head_gets_431(raw: bytes) -> None:
    """Size and count are bounded before any filter runs, whole in one read or not."""
    limits = ListenerLimits(max_head_bytes=2000, max_headers=20)
    async with serve(echo, limits=limits) as url, connect(url) as client:
        await client.send(raw)
        assert (await client.rest()).startswith(b"HTTP/1.1 431")


async def test_a_large_body_right_behind_the_head_is_no_large_head() -> None:
    """Only the head is measured."""
    async with serve(echo, limits=ListenerLimits(max_head_bytes=200)) as url, connect(url) as client:
        await client.send(post(b"x" * 50_000))
        assert (await client.response())[0].startswith(b"http/1.1 200")


@pytest.mark.parametrize("raw", [b"", b"GET / HT"])
async def test_a_head_that_does_not_come_gets_408(raw: bytes) -> None:
    """A connection without a request, or with half of one, does not stay."""
    async with serve(echo, limits=ListenerLimits(head_timeout_s=0.03)) as url, connect(url) as client:
        await client.send(raw)
        assert (await client.rest()).startswith(b"HTTP/1.1 408")


@ASYNCIO_ONLY
async def test_a_long_response_is_no_slow_head() -> None:
    """The head's timeout does not run while a response is on its way."""
    with skipping_time() as skip:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await skip(30.0)
            await echo(scope, receive, send)

        async with serve(app, limits=ListenerLimits(head_timeout_s=20.0)) as url, connect(url) as client:
            await client.send(GET)
            assert (await client.response())[0].startswith(b"http/1.1 200")


@ASYNCIO_ONLY
async def test_an_idle_connection_is_closed() -> None:
    """Without a word, once nothing came for the keep-alive time; a response that takes longer is not idle."""
    with skipping_time() as skip:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await skip(30.0)
            await echo(scope, receive, send)

        limits = ListenerLimits(keep_alive_s=20.0, head_timeout_s=1000.0)
        async with serve(app, limits=limits) as url, connect(url) as client:
            for _ in range(3):
                await client.send(GET)
                assert (await client.response())[0].startswith(b"http/1.1 200")
                await skip(10.0)  # shorter than the limit
            await skip(15.0)
            assert await client.rest() == b""


@ASYNCIO_ONLY
async def test_no_keep_alive_time_is_no_limit() -> None:
    """0 is none, as everywhere."""
    limits = ListenerLimits(keep_alive_s=0.0, head_timeout_s=20.0)
    with skipping_time() as skip:
        async with serve(echo, limits=limits) as url, connect(url) as client:
            for _ in range(3):
                await client.send(GET)
                assert (await client.response())[0].startswith(b"http/1.1 200")
                await skip(30.0)


async def test_each_request_has_a_state_of_its_own() -> None:
    """State that an app keeps there for one request is not the next one's."""
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["state"]))
        scope["state"]["mine"] = True
        await echo(scope, receive, send)

    async with serve(app) as url, connect(url) as client:
        for _ in range(2):
            await client.send(GET)
            await client.response()
    assert "mine" not in seen[1]


async def test_connections_over_the_bound_get_503() -> None:
    """In OpenAI's error shape, while those before them go on; a place given up is a place again."""
    async with serve(echo, limits=ListenerLimits(max_connections=1)) as url, connect(url) as first:
        await first.send(GET)
        await first.response()
        async with connect(url) as second:
            await second.send(GET)
            head, body = await second.response()
            assert head.startswith(b"http/1.1 503")
            assert b"retry-after: 1\r\n" in head
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("server_error", "connections_full")
            assert await second.rest() == b""
        await first.send(GET)
        assert (await first.response())[0].startswith(b"http/1.1 200")


async def test_a_flood_of_connections_is_not_even_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Refusing costs memory too, so that is bounded as well; each is counted, and one line says so."""
    limits = ListenerLimits(max_connections=1)
    refused: list[None] = []
    async with serve(echo, limits=limits, on_refused=lambda: refused.append(None)) as url:
        host, port = url.removeprefix("http://").split(":")
        pairs = [await asyncio.open_connection(host, int(port)) for _ in range(262)]
        reader, _ = pairs[-1]
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for _, writer in pairs:
            writer.close()
    assert len(refused) == 261
    assert [record.getMessage() for record in caplog.records if "refused" in record.getMessage()] == [
        f"clients are refused: all 1 connections of {url} are taken"
    ]


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
async def test_an_offer_to_upgrade_is_ignored(upgrade: bytes) -> None:
    """RFC 9110 7.8: a server may go on with HTTP/1.1; Java's client offers h2c with every POST, body and all."""
    extra = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + upgrade, b"http2-settings: AAMAAABk")
    async with serve(echo) as url, connect(url) as client:
        for _ in range(2):
            await client.send(post(b"hello", *extra))
            assert (await client.response())[1] == b"POST /a? hello"


@pytest.mark.parametrize("extra", [(), (b"connection: upgrade", b"upgrade: x")], ids=["plain", "upgrade"])
async def test_many_requests_in_one_packet_are_answered(extra: tuple[bytes, ...]) -> None:
    """The bound on a head is for one head; an offer to upgrade is another turn of a loop, not a deeper call."""
    many = 3000
    async with serve(echo) as url, connect(url) as client:
        await client.send(post(b"hello", *extra) * many)
        for _ in range(many):
            assert (await client.response())[1] == b"POST /a? hello"


async def test_connect_is_refused() -> None:
    """This is not a forward proxy."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 405")


async def test_the_client_may_ask_to_close() -> None:
    """connection: close is honoured and answered."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"\r\nconnection: close\r\n" in (await client.head())
        await client.rest()


async def test_percent_encoded_paths() -> None:
    """path is decoded, raw_path is what the client wrote."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["raw_path"], scope["query_string"]))
        await echo(scope, receive, send)

    async with serve(app) as url, connect(url) as client:
        await client.send(b"GET /a%2Fb%20c?d=%20 HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.response()
    assert seen == [("/a/b c", b"/a%2Fb%20c", b"d=%20")]


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "http.response.body", "body": b"no start"}],
        [{"type": "http.response.start", "status": 200, "headers": [(b"a", b"b\r\nc: d")]}],
        [{"type": "http.response.start", "status": 200, "headers": [(b"a b", b"c")]}],
    ],
)
async def test_an_app_that_breaks_the_rules_gets_500(messages: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of what it said goes out."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    with caplog.at_level(logging.CRITICAL):
        async with serve(app) as url, connect(url) as client:
            await client.send(GET)
            assert (await client.rest()).startswith(b"HTTP/1.1 500")


@pytest.mark.parametrize("body", [b"ab", b"abcd"], ids=["shorter", "longer"])
async def test_a_body_of_another_length_breaks_the_connection(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A client must not take a wrong response for a whole one, nor its rest for the next."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": body})

    with caplog.at_level(logging.CRITICAL):
        async with serve(app) as url, connect(url) as client:
            await client.send(GET + GET)
            assert (await client.rest()).count(b"HTTP/1.1") <= 1


async def test_nagle_is_off() -> None:
    """TCP_NODELAY on accepted connections: each token goes out when it is there."""
    options: list[int] = []

    def make(**kwargs: Any) -> Any:
        protocol = ClientProtocol(**kwargs, limits=ListenerLimits(), on_refused=lambda: None)
        made = protocol.connection_made

        def connection_made(transport: asyncio.Transport) -> None:
            sock = transport.get_extra_info("socket")
            options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            made(transport)

        protocol.connection_made = connection_made  # type: ignore[method-assign]
        return protocol

    async with serve(echo, http=make) as url, connect(url) as client:
        await client.send(GET)
        await client.response()
    assert options
    assert all(options)


@pytest.mark.parametrize("version", [uvicorn.__version__, "0.35.0", "0.54.3", "0.54.0.dev1"])
def test_the_installed_uvicorn_is_one_we_know(version: str) -> None:
    """The first and the last of the range, and what is between them."""
    require_uvicorn(version)


@pytest.mark.parametrize("version", ["0.34.9", "0.55.0", "1.40.0", "unknown"])
def test_another_uvicorn_is_refused(version: str) -> None:
    """Its server may do other things with our protocol: better an error that says what to install."""
    with pytest.raises(ConfigError) as refused:
        require_uvicorn(version)
    assert str(refused.value) == (f"uvicorn {version}: kvproxy's listener is not made for it (pip install '{UVICORN}')")


def test_the_range_of_uvicorns_is_that_of_the_package() -> None:
    """The documented range is that of an installation."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert UVICORN in project["dependencies"]
