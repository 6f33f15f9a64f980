"""Uploads that are not inference requests: bounded as every body is, streamed, and no burden for others."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.proxy.forward.request_body import START_BYTES, RequestBody, Uploads
from kvproxy.proxy.listener.server import serve
from kvproxy.proxy.request.body import BodiesFull, BodyTooLarge, BodyTooSlow, HeldBodies
from tests.proxy.listener.client import Client, connect
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loop_time import skipping_time
from tests.support.proxy import chat, running_proxy
from tests.support.until import until

PATH = b"/v1/audio/transcriptions"
#: Forms stream to the engine; everything else is looked at first, whole.
FORM = b"content-type: multipart/form-data; boundary=b"


def head(*fields: bytes, path: bytes = PATH) -> bytes:
    return b"\r\n".join([b"POST " + path + b" HTTP/1.1", b"host: x", FORM, *fields, b"", b""])


async def answer_length(engine: FakeEngine, call: Call, send: Send) -> None:
    await reply(send, 200, b"%d" % len(call.body))


@contextlib.asynccontextmanager
async def proxied(engine: FakeEngine, **config: Any) -> AsyncIterator[Any]:
    async with serve(engine) as url, running_proxy({"a": url}, **config) as proxy:
        yield proxy


async def answer(client: Client) -> tuple[int, str]:
    """Status, and the code of an error of ours."""
    status, body = await client.response()
    with contextlib.suppress(ValueError, TypeError):
        return int(status[9:12]), json.loads(body)["error"]["code"]
    return int(status[9:12]), body.decode()


async def test_an_upload_is_streamed() -> None:
    """The engine has its beginning long before its end; nothing like the whole is held."""
    engine = FakeEngine("a", answer_length)
    most = 0
    async with proxied(engine) as proxy, connect(proxy.url) as client:
        await client.send(head(b"content-length: 20000000") + b"x" * 100_000)
        await until(lambda: engine.calls and engine.calls[0].body)
        assert engine.calls[0].header("content-length") == "20000000"
        for _ in range(199):
            await client.send(b"x" * 100_000)
            most = max(most, int(proxy.metric("kvproxy_bodies_held_bytes")))
        assert await answer(client) == (200, "20000000")
        assert START_BYTES <= most < 1_000_000
        assert proxy.metric("kvproxy_bodies_held_bytes") == 0


@pytest.mark.parametrize("framing", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_no_engine_hears_of_an_upload_without_a_beginning(framing: bytes) -> None:
    """A byte of 1000 opens no connection; the last of them does."""
    engine = FakeEngine("a", answer_length)
    chunked = b"chunked" in framing
    async with proxied(engine) as proxy, connect(proxy.url) as client:
        await client.send(head(framing) + (b"3e8\r\n" if chunked else b"") + b"x")
        await until(lambda: proxy.metric("kvproxy_bodies_held_bytes") == 1)
        assert proxy.metric("kvproxy_upstream_connections", state="open") == 0
        await client.send(b"x" * 999 + (b"\r\n0\r\n\r\n" if chunked else b""))
        assert await answer(client) == (200, "1000")
        assert engine.calls[0].header("content-length") == "1000"


async def test_a_short_upload_may_be_tried_elsewhere() -> None:
    """It is there as a whole, so a refused connection costs its client nothing."""
    engine = FakeEngine("a", answer_length)
    async with serve(engine) as url, running_proxy({"dead": "http://127.0.0.1:9", "b": url}) as proxy:
        for _ in range(2):
            async with connect(proxy.url) as client:
                await client.send(head(b"content-length: 3") + b"abc")
                assert await answer(client) == (200, "3")


@pytest.mark.parametrize("expects", [True, False])
async def test_a_declared_length_over_the_limit_is_refused_unread(expects: bool) -> None:
    """413, and no `100 Continue` for a client that asks first."""
    engine = FakeEngine("a")
    fields = [b"content-length: 1001", b"expect: 100-continue"][: 2 if expects else 1]
    async with proxied(engine, limits={"body": 1000}) as proxy, connect(proxy.url) as client:
        await client.send(head(*fields))
        assert await answer(client) == (413, "body_too_large")
    assert engine.calls == []


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    """100 Continue once a route is found, then as any upload."""
    engine = FakeEngine("a", answer_length)
    async with proxied(engine) as proxy, connect(proxy.url) as client:
        await client.send(head(b"content-length: 100000", b"expect: 100-continue"))
        assert (await client.head()).startswith(b"http/1.1 100")
        await client.send(b"x" * 100_000)
        assert await answer(client) == (200, "100000")


@pytest.mark.parametrize("limit", [1000, 200_000])
async def test_an_undeclared_length_is_counted(limit: int) -> None:
    """413 also when the engine has some of it already; it is blamed for nothing, and its connection is given up."""
    engine = FakeEngine("a")
    async with proxied(engine, limits={"body": limit}) as proxy, connect(proxy.url) as client:
        await client.send(head(b"transfer-encoding: chunked"))
        for _ in range(30):
            await client.send(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert await answer(client) == (413, "body_too_large")
        assert await client.rest() == b""
        await until(lambda: proxy.metric("kvproxy_upstream_connections", state="open") == 0)
        endpoint = proxy.proxy.clusters["default"].endpoints[0]
        assert (endpoint.health.failures, endpoint.load.in_flight) == (0, 0)
        assert proxy.metric("kvproxy_bodies_held_bytes") == 0
    assert len(engine.calls) == (1 if limit > START_BYTES else 0)


@pytest.mark.parametrize("sent", [1, 100_000])
async def test_an_upload_that_stops_gets_408(sent: int) -> None:
    """Before the engine heard of it and after."""
    engine = FakeEngine("a")
    async with proxied(engine, limits={"body_timeout": "50ms"}) as proxy, connect(proxy.url) as client:
        await client.send(head(b"content-length: 1000000") + b"x" * sent)
        assert await answer(client) == (408, "body_timeout")
        assert await client.rest() == b""
        await until(lambda: proxy.metric("kvproxy_upstream_connections", state="open") == 0)
        assert proxy.metric("kvproxy_bodies_held_bytes") == 0


async def test_an_upload_that_breaks_a_bound_while_it_is_answered_is_cut() -> None:
    """Nothing can be said any more: the answer has no end."""
    answered = asyncio.Event()

    async def eager(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        answered.set()
        while (await receive())["type"] != "http.disconnect":
            continue

    async with (
        serve(eager) as url,
        running_proxy({"a": url}, limits={"body_timeout": "100ms"}) as proxy,
        connect(proxy.url) as client,
    ):
        await client.send(head(b"content-length: 1000000") + b"x" * 100_000)
        await answered.wait()
        got = await client.rest()
        assert got.startswith(b"HTTP/1.1 200")
        assert not got.endswith(b"0\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [1, START_BYTES, 100_000])
async def test_slow_uploads_do_not_take_the_engines_from_others(sent: int) -> None:
    """45 clients that stop in the middle, ten connections to the engine: inference goes on, and so do other uploads."""
    engine = FakeEngine("a", answer_length)
    async with proxied(engine, pool={"max_connections": 10}) as proxy, contextlib.AsyncExitStack() as clients:
        for _ in range(45):
            client = await clients.enter_async_context(connect(proxy.url))
            await client.send(head(b"content-length: 1000000", path=b"/v1/rerank") + b"x" * sent)
        await until(lambda: proxy.metric("kvproxy_bodies_held_bytes") >= 45 * min(sent, START_BYTES))
        answers = await asyncio.gather(
            *(proxy.client.post("/v1/chat/completions", json=chat()) for _ in range(20)),
            proxy.client.post("/v1/rerank", content=b"x" * 300_000),
        )
        assert {answer.status_code for answer in answers} == {200}
        assert answers[-1].text == "300000"
        assert proxy.metric("kvproxy_upstream_connections", state="open") <= 10
    await until(lambda: proxy.metric("kvproxy_bodies_held_bytes") == 0)


async def test_uploads_count_among_all_bodies() -> None:
    """503 with retry-after beyond limits.bodies, on any path; the room is there again when one of them leaves."""
    engine = FakeEngine("a", answer_length)
    limits = {"body": 50_000, "bodies": 100_000}
    async with proxied(engine, limits=limits) as proxy, contextlib.AsyncExitStack() as clients:
        first, second = [await clients.enter_async_context(connect(proxy.url)) for _ in range(2)]
        for client in (first, second):
            await client.send(head(b"content-length: 50000") + b"x" * 49_990)
        await until(lambda: proxy.metric("kvproxy_bodies_held_bytes") == 99_980)
        for path in ("/v1/chat/completions", "/v1/rerank"):
            refused = await proxy.client.post(path, content=b"x" * 50)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        first.writer.close()
        await until(lambda: proxy.metric("kvproxy_bodies_held_bytes") == 49_990)
        assert (await proxy.client.post("/v1/rerank", content=b"x" * 50)).text == "50"
        await second.send(b"x" * 10)
        assert await answer(second) == (200, "50000")
        assert proxy.metric("kvproxy_bodies_held_bytes") == 0


# the body alone


class Pieces:
    """A receive that hands out pieces, the last with `more` as said, and then waits."""

    def __init__(self, *pieces: bytes, more: bool = False) -> None:
        self._pieces = list(pieces)
        self._more = more

    async def __call__(self) -> Any:
        if not self._pieces:
            await asyncio.Event().wait()
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": self._more or bool(self._pieces)}


def uploads(**changed: Any) -> Uploads:
    return Uploads(
        **{"limit_bytes": 1_000_000, "timeout_s": 60.0, "held": HeldBodies(10**9), "max_streams": 1, **changed}
    )


def body_of(receive: Any, shared: Uploads, length: bytes = b"") -> RequestBody:
    headers = [(b"content-length", length)] if length else [(b"transfer-encoding", b"chunked")]
    return RequestBody.of(receive, headers, uploads=shared)


BIG = b"x" * START_BYTES


async def test_beyond_the_bound_of_streams_a_body_is_collected() -> None:
    """It takes no place among the streams, and each place is given back once."""
    shared = uploads()
    first = body_of(Pieces(BIG, BIG), shared)
    second = body_of(Pieces(BIG, BIG, BIG), shared)
    await first.read_beginning()
    await second.read_beginning()
    assert (shared.streams, first.replayable, second.consumed) == (1, True, True)
    assert second.take() == BIG * 3
    stream = first.take()
    assert not isinstance(stream, bytes | None)
    assert [piece async for piece in stream] == [BIG, BIG]
    assert (shared.streams, first.replayable) == (0, False)
    for body in (first, first, second):
        body.release_bytes()
    assert (shared.streams, shared.held.held_bytes) == (0, 0)


async def test_a_stream_given_up_gives_its_place_back() -> None:
    """Whatever became of it."""
    shared = uploads()
    body = body_of(Pieces(BIG, more=True), shared)
    await body.read_beginning()
    assert shared.streams == 1
    body.release_bytes()
    assert (shared.streams, shared.held.held_bytes) == (0, 0)


async def test_the_engine_s_time_is_not_the_client_s() -> None:
    """Time that passes between two pieces because the engine is slow to take them is no reason for a 408."""
    shared = uploads(timeout_s=20.0)
    body = body_of(Pieces(BIG, b"a", b"b", b"c"), shared)
    await body.read_beginning()
    stream = body.take()
    assert not isinstance(stream, bytes | None)
    got = b""
    with skipping_time() as skip:
        async for piece in stream:
            got += piece
            await skip(15.0)
    assert got == BIG + b"abc"


async def test_all_the_waiting_for_a_client_counts() -> None:
    """A byte now and then does not start the time again."""
    shared = uploads(timeout_s=60.0)
    pieces = 0
    with skipping_time() as skip:

        async def drip() -> Any:
            nonlocal pieces
            pieces += 1
            await skip(10.0)
            return {"type": "http.request", "body": b"x", "more_body": True}

        body = body_of(drip, shared)
        with pytest.raises(BodyTooSlow):
            await body.read_beginning()
    assert 3 <= pieces <= 7
    body.release_bytes()
    assert shared.held.held_bytes == 0


@pytest.mark.parametrize("length", [b"1000001", b"9" * 5000])
async def test_a_length_over_the_limit_is_not_waited_for(length: bytes) -> None:
    """Also one that no machine could count to."""
    with pytest.raises(BodyTooLarge):
        await body_of(Pieces(), uploads(), length).read_beginning()


async def test_the_beginning_counts_among_all_bodies() -> None:
    """From each byte's arrival."""
    shared = uploads(held=HeldBodies(100))
    body = body_of(Pieces(b"x" * 60, b"x" * 60, more=True), shared)
    with pytest.raises(BodiesFull):
        await body.read_beginning()
    assert shared.held.held_bytes == 60
    body.release_bytes()
    assert shared.held.held_bytes == 0
