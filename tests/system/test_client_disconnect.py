"""A client that leaves frees the engine at once and blames no engine."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, event, start_stream
from tests.support.proxy import RunningProxy, ask_in_process, chat, running_proxy
from tests.support.until import until

#: Files stream to the engine as they come.
FORM_HEAD = b"POST /v1/audio/x HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"


async def prefill_for_ever(engine: FakeEngine, call: Call, send: Send) -> None:
    await call.gone.wait()


async def headers_then_prefill(engine: FakeEngine, call: Call, send: Send) -> None:
    await start_stream(send)
    await call.gone.wait()


async def stream_for_ever(engine: FakeEngine, call: Call, send: Send) -> None:
    await start_stream(send)
    while not call.gone.is_set():
        await event(send, b'{"choices":[]}')
        await asyncio.sleep(0.01)


async def post_and_leave(proxy: RunningProxy, engine: FakeEngine, *, stream: bool) -> None:
    """Send a request by hand, wait until the engine has it (and the first byte of a stream), and hang up."""
    request = proxy.client.build_request("POST", "/v1/chat/completions", json=chat(stream=stream))
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(request.content)}\r\n\r\n"
    writer.write(head.encode() + request.content)
    await until(lambda: engine.calls)
    if engine.behave is stream_for_ever:
        assert await reader.read(1)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("behave", [prefill_for_ever, headers_then_prefill, stream_for_ever])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_engine_notices_at_once(behave: object, stream: bool) -> None:
    """Before the head, between head and data, and in mid-stream; the reservation is released."""
    engine = FakeEngine("a", behave)  # type: ignore[arg-type]
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        await post_and_leave(proxy, engine, stream=stream)
        await asyncio.wait_for(engine.calls[0].gone.wait(), 60)
        endpoint = proxy.proxy.clusters["default"].endpoints[0]
        await until(lambda: not endpoint.load.in_flight)
        await until(lambda: proxy.metric("kvproxy_request_ends_total", end="client_disconnected"))
        assert endpoint.health.failures == 0
        assert endpoint.breaker.state == "closed"
    assert len(engine.calls) == 1, "a cancelled request is not retried"


async def test_a_client_that_leaves_while_its_body_goes_up() -> None:
    """A streamed body that breaks off takes the upstream request with it."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(FORM_HEAD + b"content-length: 1000000\r\n\r\n" + b"x" * 100_000)
        await until(lambda: engine.calls)
        writer.close()
        await until(lambda: proxy.metric("kvproxy_request_ends_total", end="client_disconnected"))
        assert proxy.proxy.clusters["default"].endpoints[0].load.in_flight == 0
        assert proxy.metric("kvproxy_bodies_held_bytes") == 0


async def test_a_client_that_leaves_after_its_upload() -> None:
    """A body that was streamed is over: from then on the client is watched as any other."""
    engine = FakeEngine("a", prefill_for_ever)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(FORM_HEAD + b"content-length: 100000\r\n\r\n" + b"x" * 70_000)
        await until(lambda: engine.calls)
        writer.write(b"x" * 30_000)
        await until(lambda: len(engine.calls[0].body) == 100_000)
        writer.close()
        await asyncio.wait_for(engine.calls[0].gone.wait(), timeout=60)
        await until(lambda: proxy.metric("kvproxy_request_ends_total", end="client_disconnected"))


async def test_a_cancellation_that_is_not_the_clients_passes_through() -> None:
    """A server that cancels its requests to end must see them cancelled, or it would wait for ever."""
    engine = FakeEngine("a", prefill_for_ever)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        task = asyncio.create_task(ask_in_process(proxy))
        await until(lambda: engine.calls)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
