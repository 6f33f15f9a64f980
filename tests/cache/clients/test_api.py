"""The bounded call under every client: what each kind of failure becomes."""

from __future__ import annotations

import asyncio
import gzip

import httpx
import pytest

from kvproxy.base.errors import (
    BadResponse,
    ClientError,
    ClientTimeout,
    ClientUnavailable,
    ConnectError,
    FirstByteTimeout,
    NotSupported,
    Refused,
)
from kvproxy.cache.clients.api import Api, query_string
from tests.cache.clients.support import Endless, Handler, Upstream

BASE = "http://127.0.0.1:1"


def api(handler: Handler | httpx.Response, *, authorization: str | None = None) -> tuple[Api, Upstream]:
    upstream = Upstream(handler)
    return Api(upstream.http, BASE, service="vllm", authorization=authorization), upstream


def raising(error: Exception) -> Handler:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    return handler


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ReadTimeout("slow"), ClientTimeout),
        (httpx.PoolTimeout("busy"), ClientTimeout),
        (FirstByteTimeout("slow"), ClientTimeout),
        (httpx.ConnectError("refused"), ClientUnavailable),
        (httpx.RemoteProtocolError("cut"), ClientUnavailable),
        (ConnectError("refused"), ClientUnavailable),
        (httpx.DecodingError("bad encoding"), BadResponse),
    ],
)
async def test_every_transport_failure_is_one_of_ours(error: Exception, kind: type[ClientError]) -> None:
    """Callers catch ClientError and need no library's exceptions."""
    client, _ = api(raising(error))
    with pytest.raises(kind):
        await client.call("GET", "/x", timeout_s=1)


async def test_a_call_ends_at_its_own_timeout() -> None:
    """An upstream that trickles for ever is left after `timeout_s`, whatever the client's timeouts say."""

    async def trickle(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    http = httpx.AsyncClient(transport=httpx.MockTransport(trickle), timeout=60)
    with pytest.raises(ClientTimeout, match=r"no answer within 0.01 s"):
        await Api(http, BASE, service="vllm").call("GET", "/x", timeout_s=0.01)


async def test_cancellation_passes_through() -> None:
    """A caller's deadline is not a failure of the service."""

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    client = Api(httpx.AsyncClient(transport=httpx.MockTransport(never)), BASE, service="vllm")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await client.call("GET", "/x", timeout_s=5)


async def test_an_endless_answer_is_cut_at_the_bound() -> None:
    """No service can make the proxy hold more than the call's bound."""
    stream = Endless()
    client, _ = api(lambda request: httpx.Response(200, stream=stream))
    with pytest.raises(BadResponse, match="over 100000 bytes"):
        await client.call("GET", "/x", timeout_s=5, max_bytes=100_000)
    assert stream.taken_bytes <= 100_000 + len(stream.chunk)
    assert stream.closed


async def test_an_endless_error_is_cut_too() -> None:
    """An error body is read up to its own, smaller bound, and says nothing when it is longer."""
    stream = Endless(b"[1,2,3,4,5,6]")
    client, _ = api(lambda request: httpx.Response(422, stream=stream))
    with pytest.raises(Refused) as refused:
        await client.call("GET", "/x", timeout_s=5)
    assert str(refused.value) == "vllm /x: 422"
    assert stream.taken_bytes < 70_000


async def test_compressed_answers_are_not_asked_for() -> None:
    """A bounded body must not unpack into an unbounded one."""
    client, upstream = api(httpx.Response(200, text="ok"))
    assert await client.call("GET", "/x", timeout_s=1) == b"ok"
    assert upstream.requests[0].headers["accept-encoding"] == "identity"


async def test_the_credential_is_sent_and_never_shown() -> None:
    """Not even when the service echoes it."""
    reply = httpx.Response(401, json={"error": {"message": "no such key sk-geheim, Bearer sk-other"}})
    client, upstream = api(reply, authorization="Bearer sk-geheim")
    with pytest.raises(Refused) as refused:
        await client.call("GET", "/x", timeout_s=1)
    assert upstream.requests[0].headers["authorization"] == "Bearer sk-geheim"
    assert "sk-" not in str(refused.value)
    assert "sk-geheim" not in repr(client)


async def test_a_base_url_with_a_path_and_a_password() -> None:
    """The path is kept; user and password never reach an error text."""
    upstream = Upstream(httpx.Response(500))
    client = Api(upstream.http, "http://user:secret@127.0.0.1:1/base/", service="vllm")
    with pytest.raises(Refused) as refused:
        await client.call("GET", "/x", timeout_s=1)
    assert upstream.requests[0].url.path == "/base/x"
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, {"detail": "Not Found"}, NotSupported),
        (404, {"error": {"message": "The model `x` does not exist.", "param": "model"}}, Refused),
        (404, {"detail": "unknown instance mp-9"}, Refused),
        (405, {"detail": "Method Not Allowed"}, NotSupported),
        (501, {}, NotSupported),
        (307, {}, Refused),
        (503, {"error": {"message": "busy"}}, Refused),
    ],
)
async def test_a_missing_route_is_not_a_missing_thing(status: int, body: object, kind: type[Refused]) -> None:
    """Only a 404 about the path itself says that the service lacks the call."""
    client, _ = api(httpx.Response(status, json=body))
    with pytest.raises(Refused) as refused:
        await client.call("GET", "/x", timeout_s=1)
    assert type(refused.value) is kind
    assert refused.value.status == status


@pytest.mark.parametrize("body", [b"not json", b'{"version": 5}', b"[]", b"\xff\xfe", b"[" * 100_000])
async def test_an_answer_of_another_shape_is_a_bad_one(body: bytes) -> None:
    """The text names the place and never quotes the content."""
    client, _ = api(httpx.Response(200, content=body))
    with pytest.raises(BadResponse) as bad:
        await client.get("/version", dict[str, str], timeout_s=1)
    assert len(str(bad.value)) < 200


def test_a_query_leaves_out_what_is_empty() -> None:
    """Filters that are not given are not sent."""
    assert query_string({"a": "", "b": ""}) == ""
    assert query_string({"a": "x y", "b": 0}) == "?a=x+y&b=0"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "GZIP", "identity, gzip"])
async def test_a_compressed_answer_is_refused_unread(coding: str) -> None:
    """It was not asked for, and a few bytes could become any number."""
    packed = Endless(gzip.compress(bytes(1 << 20)))
    client, _ = api(httpx.Response(200, headers={"content-encoding": coding}, stream=packed))
    with pytest.raises(BadResponse, match="content-encoding"):
        await client.call("GET", "/x", timeout_s=1)
    assert packed.taken_bytes == 0


async def test_a_compressed_error_is_its_status_alone() -> None:
    """Its body is not worth unpacking."""
    packed = Endless(gzip.compress(b'{"error": "no"}'))
    client, _ = api(httpx.Response(500, headers={"content-encoding": "gzip"}, stream=packed))
    with pytest.raises(Refused, match="500"):
        await client.call("GET", "/x", timeout_s=1)
    assert packed.taken_bytes == 0


async def test_identity_is_no_coding() -> None:
    """Some servers say it."""
    client, _ = api(lambda _: httpx.Response(200, headers={"content-encoding": "identity"}, content=b"ok"))
    assert await client.call("GET", "/x", timeout_s=1) == b"ok"


@pytest.mark.parametrize("value", [b"{}", b"[]", b"[[[]]]"])
async def test_an_answer_has_a_bounded_number_of_values(value: bytes) -> None:
    """A megabyte of empty lists costs more than a megabyte of text; nothing is made of it."""
    body = b'{"x": [' + b",".join([value] * 20_000) + b"]}"
    client, _ = api(httpx.Response(200, content=body))
    with pytest.raises(BadResponse, match="objects and lists"):
        await client.get("/x", dict, timeout_s=1)
