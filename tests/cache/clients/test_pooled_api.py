"""The same API over the pool: what engines are asked with, past httpx."""

from __future__ import annotations

import asyncio

import pytest

from kvproxy.base.errors import BadResponse, ClientTimeout, ClientUnavailable, Refused
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.base.upstream.transport import HttpClients
from kvproxy.cache.clients.api import Api
from tests.support.scripted import Peer, answer, scripted


async def ask(reply: bytes, *, max_bytes: int = 100) -> tuple[bytes, bytes]:
    """Return the answer, and the request as it arrived."""
    async with scripted(answer(reply)) as upstream, UpstreamPool() as pool:
        api = Api(HttpClients(pool).client(), str(upstream.origin), service="vllm", authorization="Bearer secret")
        body = await api.call("POST", "/x", timeout_s=60.0, body=b"{}", max_bytes=max_bytes)
        return body, upstream.peers[0].requests[0]


async def test_a_body_and_what_it_was_asked_with() -> None:
    """Credential and type go along, and no coding is accepted."""
    body, request = await ask(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert body == b"ok"
    for line in (b"authorization: Bearer secret", b"accept-encoding: identity", b"content-type: application/json"):
        assert line + b"\r\n" in request


async def test_an_answer_beyond_the_bound_is_left() -> None:
    """Its connection is not used again."""
    with pytest.raises(BadResponse, match=r"vllm /x: answer over 3 bytes"):
        await ask(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlong", max_bytes=3)


async def test_an_answer_in_a_coding_is_refused() -> None:
    """A bounded body must not become an unbounded one."""
    with pytest.raises(BadResponse, match="content-encoding 'gzip'"):
        await ask(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok")


async def test_an_error_status_is_quoted_without_the_credential() -> None:
    """As an engine words it."""
    text = b'{"error":{"message":"not with secret"}}'
    with pytest.raises(Refused, match=r"vllm /x: 400 not with \*\*\*"):
        await ask(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))


async def test_a_silent_engine_times_out() -> None:
    """Within the call's own time."""

    async def silent(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with scripted(silent) as upstream, UpstreamPool() as pool, asyncio.timeout(60):
        api = Api(HttpClients(pool).client(), str(upstream.origin), service="vllm")
        with pytest.raises(ClientTimeout, match=r"vllm /x: no answer within 0\.05 s"):
            await api.call("GET", "/x", timeout_s=0.05)


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    """By the name of what went wrong."""
    async with scripted() as upstream, UpstreamPool() as pool:
        url = str(upstream.origin)
        api = Api(HttpClients(pool).client(), url, service="vllm")
    async with UpstreamPool() as pool:
        api = Api(HttpClients(pool).client(), url, service="vllm")
        with pytest.raises(ClientUnavailable, match="vllm /x: ConnectError"):
            await api.call("GET", "/x", timeout_s=60.0)


async def test_a_name_and_password_in_the_address_are_sent() -> None:
    """As a basic credential."""
    async with scripted(answer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")) as upstream, UpstreamPool() as pool:
        url = str(upstream.origin).replace("://", "://name:word@")
        await Api(HttpClients(pool).client(), url, service="vllm").call("GET", "/x", timeout_s=60.0)
        assert b"authorization: Basic bmFtZTp3b3Jk\r\n" in upstream.peers[0].requests[0]
