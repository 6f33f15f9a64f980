"""The pool as an httpx transport: streams, timeouts and errors as httpx users know them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from kvproxy.base.tls.files import ClientTls
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.base.upstream.transport import HttpClients, PoolTransport
from tests.base.upstream.calls import HEAD_ONLY, OK, pieces, until
from tests.support.scripted import Peer, answer, scripted


async def test_a_request_and_its_response() -> None:
    """Method, target, headers and body go through as httpx built them, once."""
    reply = b"HTTP/1.1 418 Teapot\r\nContent-Type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    async with scripted(answer(reply)) as upstream, UpstreamPool() as pool:
        async with httpx.AsyncClient(transport=PoolTransport(pool), base_url=str(upstream.origin)) as client:
            response = await client.post("/v1/chat?a=b%20c", json={"x": 1}, headers={"X-Thing": "1"})
            assert (response.status_code, response.json()) == (418, {})
            assert (await client.get("/v1/models")).status_code == 418
        assert pool.idle == 1  # the client is closed, the pool is not
        first, second = upstream.peers[0].requests
        assert first.startswith(b"POST /v1/chat?a=b%20c HTTP/1.1\r\nhost: ")
        assert first.lower().count(b"\r\nhost: ") == first.lower().count(b"\r\ncontent-length: 7\r\n") == 1
        assert b"\r\nx-thing: 1\r\n" in first
        assert first.endswith(b'{"x":1}')
        assert b"content-length" not in second


async def test_streams_both_ways() -> None:
    """An async iterator goes up, pieces come down as they arrive; leaving early tells the engine."""
    gone = asyncio.Event()

    async def stream(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD_ONLY + b"3\r\nabc\r\n")
        await peer.gone()
        gone.set()

    async with scripted(stream) as upstream, UpstreamPool() as pool:
        client = httpx.AsyncClient(transport=PoolTransport(pool))
        async with client.stream("POST", str(upstream.origin), content=pieces(b"up", b"load")) as response:
            assert await anext(response.aiter_raw()) == b"abc"
        async with asyncio.timeout(60):
            await gone.wait()
        assert upstream.peers[0].requests[0].endswith(b"2\r\nup\r\n4\r\nload\r\n0\r\n\r\n")
        assert pool.open == 0


async def silent(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def head_then_silent(peer: Peer) -> None:
    await peer.request()
    await peer.send(HEAD_ONLY)
    await peer.gone()


async def head_then_death(peer: Peer) -> None:
    await peer.request()
    await peer.send(HEAD_ONLY)


async def test_the_requests_own_timeout_counts() -> None:
    """httpx's read timeout bounds the wait for the head and each pause after it."""
    async with scripted(silent, head_then_silent) as upstream, UpstreamPool() as pool:
        client = httpx.AsyncClient(transport=PoolTransport(pool), timeout=httpx.Timeout(5, read=0.03))
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout) as caught:
                await client.get(str(upstream.origin))
            assert str(caught.value.request.url).startswith("http://127.0.0.1")


async def test_the_transports_timeouts_apply_where_a_request_has_none() -> None:
    """A bare httpx.Request carries no extensions."""
    async with scripted(silent) as upstream, UpstreamPool() as pool:
        transport = PoolTransport(pool, Timeouts(first_byte_s=0.03))
        with pytest.raises(httpx.ReadTimeout):
            await transport.handle_async_request(httpx.Request("GET", str(upstream.origin)))


async def test_a_read_timeout_of_none_is_none() -> None:
    """And a full line is httpx's PoolTimeout."""
    async with scripted(answer(OK), silent) as upstream, UpstreamPool(max_connections=1, max_waiting=0) as pool:
        client = httpx.AsyncClient(transport=PoolTransport(pool), timeout=httpx.Timeout(None))
        assert (await client.get(str(upstream.origin))).content == b"ok"
        busy = asyncio.create_task(client.post(str(upstream.origin), content=_never()))
        await until(lambda: pool.idle == 0)
        with pytest.raises(httpx.PoolTimeout):
            await client.get(str(upstream.origin))
        busy.cancel()
        with pytest.raises(asyncio.CancelledError):
            await busy


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_errors_become_httpx_errors() -> None:
    """So that code written for httpx handles them."""
    async with scripted(head_then_death, answer(b"not http")) as upstream, UpstreamPool() as pool:
        client = httpx.AsyncClient(transport=PoolTransport(pool))
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(str(upstream.origin))
        with pytest.raises(httpx.LocalProtocolError):
            await client.get(str(upstream.origin), headers=[(b"a", b"b\r\nc: d")])
        with pytest.raises(httpx.ConnectError):
            await client.get("https://127.0.0.1:1/")
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get("ftp://127.0.0.1/")


async def test_origins_remembered_are_bounded() -> None:
    """A client that calls ever new addresses does not grow the transport."""
    async with UpstreamPool() as pool:
        transport = PoolTransport(pool)
        for port in range(1, 3000):
            transport._origin(httpx.URL(f"http://[::1]:{port}"))
        assert len(transport._origins) <= 1024
        assert transport._origin(httpx.URL("http://[::1]:5")).host == "::1"


async def test_a_client_is_one_for_each_way_to_verify() -> None:
    """Addresses do not matter, and a server name, an authority and verifying nothing do."""
    async with UpstreamPool() as pool:
        clients = HttpClients(pool)
        plain = clients.client()
        assert clients.client(Origin("https", "a", 1)) is clients.client(Origin("http", "b", 2)) is plain
        named, insecure = (
            Origin("https", "a", 1, server_name="b"),
            Origin("https", "a", 1, tls=ClientTls(insecure=True)),
        )
        assert len({id(clients.client(one)) for one in (None, named, insecure)}) == 3
        assert clients.client(named) is clients.client(named)
        await clients.aclose()
        assert plain.is_closed
        assert clients.client(named).is_closed


async def test_a_request_past_httpx() -> None:
    """Goes to the same place, with the fields it was given, the host and a length."""
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        transport = PoolTransport(pool)
        for _ in range(2):
            response = await transport.fetch(
                b"POST", f"{upstream.origin}/v1/x?a=b%20c", [(b"x-thing", b"1")], b"{}", timeout_s=60.0
            )
            assert response.status == 200
            while await response.next_chunk():
                continue
        assert pool.open == 1
        first, second = upstream.peers[0].requests
        assert first == second
        assert first.startswith(b"POST /v1/x?a=b%20c HTTP/1.1\r\n")
        assert b"x-thing: 1\r\n" in first
        assert first.endswith(b"\r\n\r\n{}")
