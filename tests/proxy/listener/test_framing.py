"""Bytes that belong to a request and bytes that frame it, one by one; and how a connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvproxy.proxy.listener.arrivals import MAX_UNWANTED_BYTES
from kvproxy.proxy.listener.ending import MOST_BYTES, Linger
from kvproxy.proxy.listener.parser import MAX_FRAMING_BYTES, ListenerLimits
from kvproxy.proxy.listener.server import Server, serve
from kvproxy.proxy.settings import ListenerTls
from tests.proxy.listener.client import Client, body_of, connect, echo
from tests.support.certificates import make_certificate
from tests.support.until import until

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Seen:
    """An app that answers with the body's length, and remembers the header fields as they are once the body is read."""

    def __init__(self) -> None:
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        text = b"%d" % len(await body_of(receive))
        self.headers.append(list(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
        await send({"type": "http.response.body", "body": text})


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """401 without a look at the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def send_in(client: Client, pieces: Sequence[bytes]) -> None:
    """Each piece as a packet of its own, read by the listener before the next comes."""
    for piece in pieces:
        await client.send(piece)
        await asyncio.sleep(0.002)


TRAILERS = b"authorization: Bearer k\r\nx-forwarded-for: 6.6.6.6\r\nhost: y\r\nconnection: upgrade\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize("split", [None, 4, 30], ids=["whole", "before", "within"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_trailers_are_no_header_fields(split: int | None, version: bytes) -> None:
    """However the packets fall: a key or an address in a trailer is none of the head's (RFC 9110 6.5.1)."""
    seen = Seen()
    head = CHUNKED.replace(b"HTTP/1.1", b"HTTP/" + version)
    body = b"0\r\n" + TRAILERS + b"\r\n"
    pieces = [head + b"2\r\nab\r\n" + body]
    if split is not None:
        pieces = [head + b"2\r\nab\r\n" + body[:split], body[split:]]
    async with serve(seen) as url, connect(url) as client:
        await send_in(client, pieces)
        assert (await client.response())[1] == b"2"
        if version == b"1.1":
            await client.send(GET)
            assert (await client.response())[1] == b"0"
    assert seen.headers[0] == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]


FLOOD = 2 * MAX_FRAMING_BYTES


@pytest.mark.parametrize(
    "framing",
    [
        b"0\r\n" + b"a: b\r\n" * (FLOOD // 6 + 1) + b"\r\n",
        b"0\r\na: " + b"b" * FLOOD + b"\r\n\r\n",
        b"2;" + b"e" * FLOOD + b"\r\nab\r\n0\r\n\r\n",
        b"0" * FLOOD + b"2\r\nab\r\n0\r\n\r\n",
        b"0\r\n\r\n" + b"\r\n" * FLOOD,
    ],
    ids=["many trailers", "long trailer", "extension", "size", "blank lines"],
)
@pytest.mark.parametrize("pieces", [1, 9])
async def test_framing_without_body_is_bounded(framing: bytes, pieces: int) -> None:
    """64 KiB of it, in one read or many, then 400; the app does not take what came for a whole request."""
    ended: list[bool] = []
    app_done = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        ended.append(message["type"] == "http.request")
        app_done.set()
        await asyncio.Event().wait()

    cut = len(framing) // pieces + 1
    async with serve(app, drain_s=0.0, cut_grace_s=0.0) as url, connect(url) as client:
        await client.send(CHUNKED + b"5\r\nhello\r\n")
        await send_in(client, [framing[at : at + cut] for at in range(0, len(framing), cut)])
        assert (await client.rest()).startswith(b"HTTP/1.1 400")
        await app_done.wait()
    assert pieces == 1 or ended == [False] or framing.startswith(b"0\r\n\r\n")


async def test_head_and_framing_of_one_read_are_told_apart() -> None:
    """A large head does not hide a large extension behind it, nor a large body."""
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\na: " + b"b" * 30_000 + b"\r\n\r\n")
    async with serve(Seen()) as url:
        async with connect(url) as client:
            await client.send(head + b"2;" + b"e" * 100_000 + b"\r\nab\r\n0\r\n\r\n")
            assert (await client.rest()).startswith(b"HTTP/1.1 400")
        async with connect(url) as client:
            await client.send(head + b"%x\r\n" % 150_000 + b"x" * 150_000 + b"\r\n0\r\n\r\n")
            assert (await client.response())[1] == b"150000"


@pytest.mark.parametrize(("size", "extension"), [(1, b""), (8192, b";chunk-signature=" + b"5" * 64)])
async def test_small_chunks_are_no_attack(size: int, extension: bytes) -> None:
    """Chunks of one byte, and signed ones as object stores' clients send them."""
    count = 40_000 if size == 1 else 40
    chunk = b"%x%b\r\n%b\r\n" % (size, extension, b"x" * size)
    async with serve(Seen()) as url, connect(url) as client:
        await client.send(CHUNKED + chunk * count + b"0\r\n\r\n")
        assert (await client.response())[1] == b"%d" % (size * count)


@pytest.mark.parametrize(
    "fields",
    [b"transfer-encoding: gzip, chunked", b"transfer-encoding: gzip\r\ntransfer-encoding: chunked",
     b"transfer-encoding: deflate , CHUNKED"],
)  # fmt: skip
async def test_unknown_transfer_codings_get_501(fields: bytes) -> None:
    """Only chunked is taken off here: passing the rest on would hand packed bytes to the engine as plain ones."""
    seen = Seen()
    async with serve(seen) as url, connect(url) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n\r\n2\r\nab\r\n0\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 501")
        assert "transfer coding" in json.loads(body)["error"]["message"]
    assert seen.headers == []


@pytest.mark.parametrize(
    "coding", [b"gzip", b"chunked, gzip", b"identity", b"xchunked", b"chunked\r\ntransfer-encoding: chunked"]
)
async def test_a_body_whose_end_cannot_be_told_is_refused(coding: bytes) -> None:
    """RFC 9112 6.3: chunked must be the last coding."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: " + coding + b"\r\n\r\n2\r\nab\r\n")
        assert (await client.rest())[9:12] in (b"400", b"501")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nHost: y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\nhost: x\r\nhost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n", b"200"),
    ],
)
async def test_one_host_field(raw: bytes, status: bytes) -> None:
    """RFC 9112 3.2: none (but in HTTP/1.0) or two is 400."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(raw)
        assert (await client.rest())[9:12] == status


async def test_blank_lines_do_not_keep_a_connection() -> None:
    """Between two requests they are nothing, as before the first."""
    limits = ListenerLimits(keep_alive_s=0.2, head_timeout_s=5.0)
    async with serve(echo, limits=limits) as url, connect(url) as client:
        await client.send(GET)
        await client.response()
        reading = asyncio.create_task(client.rest())
        while not reading.done():
            client.writer.write(b"\r\n")
            await asyncio.wait([reading], timeout=0.02)
        assert await reading == b""


async def test_blank_lines_do_not_keep_a_fresh_connection() -> None:
    """The head's time runs from the connection's start."""
    async with serve(echo, limits=ListenerLimits(head_timeout_s=0.2)) as url, connect(url) as client:
        reading = asyncio.create_task(client.rest())
        while not reading.done():
            client.writer.write(b"\r\n")
            await asyncio.wait([reading], timeout=0.02)
        assert (await reading).startswith(b"HTTP/1.1 408")


async def test_a_body_that_goes_on_after_the_answer_does_not_keep_a_connection() -> None:
    """Dripping what no app reads any more is idling."""
    async with serve(refuse, limits=ListenerLimits(keep_alive_s=0.2)) as url, connect(url) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.response())[1] == b"no"
        reading = asyncio.create_task(client.rest())
        while not reading.done():
            client.writer.write(b"x")
            await asyncio.wait([reading], timeout=0.02)
        assert await reading == b""


async def pour(client: Client) -> int:
    """Send chunks of a body until the connection is cut; returns the bytes sent."""
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    sent = 0
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                await client.send(piece)
                sent += len(piece)
    return sent


@pytest.mark.parametrize("field", [b"", b"connection: close\r\n"], ids=["kept", "closed"])
async def test_an_endless_body_behind_its_answer_is_not_swallowed(field: bytes) -> None:
    """The connection is closed after a bounded part of it, not after the time that an idle one has."""
    limits = ListenerLimits(keep_alive_s=600.0, linger_s=600.0)
    async with serve(refuse, limits=limits) as url, connect(url) as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + field + b"\r\n")
        assert (await client.response())[1] == b"no"
        assert await pour(client) < 2 * (MOST_BYTES + MAX_UNWANTED_BYTES)


async def test_a_short_body_behind_its_answer_costs_no_connection() -> None:
    """It is dropped, and the next request is answered; each body is counted by itself."""
    size = MAX_UNWANTED_BYTES
    async with serve(refuse) as url, connect(url) as client:
        for _ in range(3):
            await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
            assert (await client.response())[1] == b"no"
            await client.send(b"x" * size)


async def test_half_a_head_behind_a_request_has_the_time_of_heads() -> None:
    """Also when it came before the response to the request before it was out."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await echo(scope, receive, send)

    limits = ListenerLimits(keep_alive_s=600.0, head_timeout_s=0.1)
    async with serve(app, limits=limits) as url, connect(url) as client:
        await client.send(GET + b"GET / HT")
        await asyncio.sleep(0.01)
        go.set()
        assert (await client.response())[0].startswith(b"http/1.1 200")
        assert (await client.rest()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("size", [5_000_000, 50_000_000])
@pytest.mark.parametrize("how", [b"connection: close", b"transfer-encoding: chunked\r\nconnection: close"])
async def test_an_answer_is_not_lost_to_what_the_client_still_sends(size: int, how: bytes) -> None:
    """A client that looks for the answer once it has sent everything finds it, not a reset."""
    framing = b"" if b"chunked" in how else b"content-length: %d\r\n" % size
    head = b"POST /a HTTP/1.1\r\nhost: x\r\n" + how + b"\r\n" + framing + b"\r\n"
    async with serve(refuse) as url, connect(url) as client:
        await client.send(head + (b"%x\r\n" % size if b"chunked" in how else b""))
        piece = b"x" * 500_000
        for _ in range(size // len(piece)):
            await client.send(piece)
        if b"chunked" in how:
            await client.send(b"\r\n0\r\n\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 401")
        assert answer.endswith(b"\r\n\r\nno")


async def test_a_refusal_by_the_listener_is_not_lost_either() -> None:
    """431 while the head is still coming."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n")
        for _ in range(40):
            await client.send(b"a: " + b"b" * 100_000 + b"\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 431")


async def test_a_lingering_connection_does_not_stay() -> None:
    """A client that neither reads nor leaves is let go after a silence, and one that leaves at once."""
    async with Server(refuse, limits=ListenerLimits(linger_s=0.2)) as server:
        for leaves in (True, False):
            async with connect(server.url) as client:
                await client.send(b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\nx")
                await client.head()
                if not leaves:
                    await until(lambda: not server.connections)
            await until(lambda: not server.connections)


class GoneTransport(asyncio.Transport):
    """As asyncio's own, of a client that is gone before the event loop has read of it."""

    aborted = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    def abort(self) -> None:
        self.aborted = True


async def test_a_client_that_is_gone_is_not_waited_for() -> None:
    """Its socket cannot be shut down any more."""
    transport = GoneTransport()
    Linger(transport, asyncio.get_running_loop(), silence_s=60.0).cancel()
    assert transport.aborted


async def test_draining_does_not_wait_for_those_that_linger() -> None:
    """They have their answer."""
    async with asyncio.timeout(50):
        async with Server(refuse, drain_s=60) as server, connect(server.url) as client:
            await client.send(b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\nx")
            await client.head()
            await server.__aexit__(None, None, None)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_over_tls_a_refused_upload_gets_its_answer(tmp_path: Path, version: bytes) -> None:
    """TLS closes both directions or none: an answer whose end is the close gets the close."""

    async def without_length(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    files = make_certificate(tmp_path, "127.0.0.1")
    tls = ListenerTls(certificate=str(files.certificate), private_key=str(files.private_key))
    async with serve(without_length, tls=tls) as url:
        context = ssl.create_default_context(cafile=files.certificate)
        host, port = url.removeprefix("https://").split(":")
        client = Client(*await asyncio.open_connection(host, int(port), ssl=context))
        await client.send(b"POST / HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\nx")
        assert (await client.head()).startswith(b"http/1.1 401")
        if version == b"1.0":
            assert await client.rest() == b"no"
        else:
            assert await client.reader.readexactly(12) == b"2\r\nno\r\n0\r\n\r\n"
        client.writer.close()


async def test_an_answer_that_breaks_off_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that died is no bug of the app; the client cannot take what it got for the whole."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    with caplog.at_level(logging.INFO):
        async with serve(app) as url, connect(url) as client:
            await client.send(b"GET /a%0Ab?c HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.rest()).endswith(b"half")
    (record,) = [record for record in caplog.records if record.levelno > logging.INFO]
    assert record.levelname == "WARNING"
    assert record.getMessage() == "the answer to GET /a%0Ab broke off: its client's connection is cut"


async def test_an_app_without_an_answer_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """That one is a bug: 500, and a line that says so."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    with caplog.at_level(logging.INFO):
        async with serve(app) as url, connect(url) as client:
            await client.send(GET)
            assert (await client.rest()).startswith(b"HTTP/1.1 500")
    assert [record.levelname for record in caplog.records if record.name.startswith("kvproxy")] == ["ERROR"]
