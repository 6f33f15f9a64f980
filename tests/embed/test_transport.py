"""httpx clients whose requests the proxy routes in their own process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import httpx2
import pytest
from starlette.types import Send

from kvproxy import AsyncTransport, ConfigError, Proxy, Transport
from kvproxy.proxy.listener.server import Server
from kvproxy.testing import simulated_engines
from tests.support.fake_engine import Call, FakeEngine, event, reply, start_stream
from tests.support.loop_time import skipping_time
from tests.support.until import until

CHAT = "http://engines/v1/chat/completions"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "a long beginning " * 100}], "max_tokens": 4}


@asynccontextmanager
async def client_of(*engines: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of these engines."""
    async with AsyncExitStack() as stack:
        endpoints = {
            engine.name: (await stack.enter_async_context(Server(engine, drain_s=0.1))).url for engine in engines
        }
        config = {"endpoints": endpoints, "policy": "round_robin"}
        yield await stack.enter_async_context(httpx.AsyncClient(transport=AsyncTransport(config), timeout=60.0))


# what a client gets


async def test_a_session_stays_where_its_prefix_is() -> None:
    """The openai package over three engines: the second turn finds the first one's tokens."""
    import openai  # takes a second

    async with simulated_engines(3) as endpoints:
        async with httpx.AsyncClient(transport=AsyncTransport(endpoints=endpoints)) as http:
            client = openai.AsyncOpenAI(base_url="http://engines/v1", api_key="x", http_client=http)
            messages = list(BODY["messages"])
            for _ in range(2):
                answer = await client.chat.completions.create(model="sim", messages=messages, max_tokens=8)
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens


async def test_a_stream_comes_in_pieces_and_ends_whole() -> None:
    go_on = asyncio.Event()

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b"1")
        await go_on.wait()
        await event(send, b"2")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with client_of(FakeEngine("a", behave)) as client, client.stream("POST", CHAT, json=BODY) as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        go_on.set()
        assert b"".join([piece async for piece in pieces]) == b"data: 2\n\n"


async def test_a_stream_that_is_closed_ends_the_engines_request() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b"1")
        await call.gone.wait()

    engine = FakeEngine("a", behave)
    async with client_of(engine) as client:
        async with client.stream("POST", CHAT, json=BODY) as answer:
            await anext(answer.aiter_raw())
        await asyncio.wait_for(engine.calls[0].gone.wait(), 10)


async def test_a_body_in_pieces_arrives_whole() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        text = json.dumps(BODY).encode()
        for start in range(0, len(text), 100):
            yield text[start : start + 100]

    engine = FakeEngine("a")
    async with client_of(engine) as client:
        answer = await client.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
    assert answer.json()["served_by"] == "a"
    assert json.loads(engine.calls[0].body) == BODY


async def test_a_slow_upload_is_no_silence_of_the_engine() -> None:
    """As of httpx's own transport, the time for reading begins behind the body."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await skip(40.0)
        yield b"}"

    async with client_of(FakeEngine("a")) as client:
        with skipping_time() as skip:
            answer = await client.post(CHAT, content=pieces(), timeout=30.0)
    assert answer.json()["served_by"] == "a"


async def test_an_error_of_the_clients_own_code_reaches_its_caller() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        raise LookupError("no more")

    async with client_of(FakeEngine("a")) as client:
        with pytest.raises(LookupError, match="no more"):
            await client.post(CHAT, content=pieces())


# what httpx's own transport would raise


async def test_no_engine_is_a_connect_error() -> None:
    async with httpx.AsyncClient(transport=AsyncTransport(endpoints={"a": "http://127.0.0.1:9"})) as client:
        with pytest.raises(httpx.ConnectError, match="connection refused") as raised:
            await client.post(CHAT, json=BODY)
    assert raised.value.request.url == CHAT


async def test_a_silent_engine_is_a_read_timeout_and_its_request_ends() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await call.gone.wait()

    engine = FakeEngine("a", behave)
    async with client_of(engine) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=BODY, timeout=0.2)
        await asyncio.wait_for(engine.calls[0].gone.wait(), 10)


async def test_a_stream_that_falls_silent_is_a_read_timeout() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b"1")
        await call.gone.wait()

    engine = FakeEngine("a", behave)
    async with client_of(engine) as client, client.stream("POST", CHAT, json=BODY, timeout=0.2) as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        with pytest.raises(httpx.ReadTimeout):
            await anext(pieces)


async def test_an_answer_that_breaks_off_is_a_protocol_error() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("the engine dies")

    async with client_of(FakeEngine("a", behave)) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, json=BODY)


async def test_a_stream_that_breaks_off_is_a_protocol_error_behind_its_pieces() -> None:
    """Not an error event, which the proxy sends to clients that have no other way to see it."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b"1")
        raise RuntimeError("the engine dies")

    async with client_of(FakeEngine("a", behave)) as client, client.stream("POST", CHAT, json=BODY) as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(pieces)


async def test_clients_of_httpx2_get_its_answers_and_its_errors() -> None:
    """The successor of httpx, which newer SDKs require."""
    async with (
        simulated_engines(1) as endpoints,
        httpx2.AsyncClient(transport=AsyncTransport(endpoints=endpoints), timeout=60.0) as client,
    ):
        answer = await client.post(CHAT, json=BODY)
        assert isinstance(answer, httpx2.Response)
        async with client.stream("POST", CHAT, json=BODY | {"stream": True}) as stream:
            assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
    async with httpx2.AsyncClient(transport=AsyncTransport(endpoints={"a": "http://127.0.0.1:9"})) as client:
        with pytest.raises(httpx2.ConnectError, match="connection refused"):
            await client.post(CHAT, json=BODY)


def test_synchronous_clients_of_httpx2(engines: dict[str, str]) -> None:
    with httpx2.Client(transport=Transport(endpoints=engines), timeout=60.0) as client:
        answer = client.post(CHAT, json=BODY | {"stream": True})
        assert answer.read().endswith(b"data: [DONE]\n\n")
    client = httpx2.Client(transport=Transport(endpoints={"a": "http://127.0.0.1:9"}))
    with client, pytest.raises(httpx2.ConnectError):
        client.post(CHAT, json=BODY)


async def test_an_engines_own_error_is_an_answer() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 500, b'{"error":{"message":"out of memory"}}')

    async with client_of(FakeEngine("a", behave)) as client:
        assert (await client.post(CHAT, json=BODY)).status_code == 500


# its life


async def test_a_running_proxy_may_be_shared_and_is_its_makers_to_end() -> None:
    engine = FakeEngine("a")
    async with Server(engine, drain_s=0.1) as server, Proxy({"endpoints": {"a": server.url}}) as proxy:
        for _ in range(2):
            async with httpx.AsyncClient(transport=AsyncTransport(proxy)) as client:
                assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert len(engine.calls) == 2


async def test_a_client_that_is_closed_may_be_followed_by_another() -> None:
    engine = FakeEngine("a")
    async with Server(engine, drain_s=0.1) as server:
        transport = AsyncTransport(endpoints={"a": server.url})
        for _ in range(3):
            async with httpx.AsyncClient(transport=transport) as client:
                assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_requests_under_way_end_with_the_transport() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b"1")
        await call.gone.wait()

    engine = FakeEngine("a", behave)
    async with client_of(engine) as client:
        answer = await client.send(client.build_request("POST", CHAT, json=BODY), stream=True)
        await anext(answer.aiter_raw())
    await asyncio.wait_for(engine.calls[0].gone.wait(), 10)


async def test_a_start_that_fails_is_raised_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine("a")
    starts = []
    enter = Proxy.__aenter__

    async def fails_once(proxy: Proxy) -> Proxy:
        starts.append(proxy)
        if len(starts) == 1:
            raise OSError("no room")
        return await enter(proxy)

    monkeypatch.setattr(Proxy, "__aenter__", fails_once)
    async with Server(engine, drain_s=0.1) as server:
        transport = AsyncTransport(endpoints={"a": server.url})
        client = httpx.AsyncClient(transport=transport)
        with pytest.raises(OSError, match="no room"):
            await client.post(CHAT, json=BODY)
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        await client.aclose()


def test_a_client_of_the_other_kind_is_a_clear_error() -> None:
    transport: Any = AsyncTransport(endpoints={"a": "http://127.0.0.1:9"})
    client = httpx.Client(transport=transport)
    with pytest.raises(TypeError, match=r"give a Client kvproxy\.Transport"):
        client.get(CHAT)
    with pytest.raises(TypeError, match=r"give a Client kvproxy\.Transport"), httpx.Client(transport=transport):
        pass


async def test_an_asynchronous_client_of_the_other_kind_is_a_clear_error() -> None:
    transport: Any = Transport(endpoints={"a": "http://127.0.0.1:9"})
    client = httpx.AsyncClient(transport=transport)
    with pytest.raises(TypeError, match=r"give an AsyncClient kvproxy\.AsyncTransport"):
        await client.get(CHAT)
    with pytest.raises(TypeError, match=r"give an AsyncClient kvproxy\.AsyncTransport"):
        await httpx.AsyncClient(transport=transport).__aenter__()


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="endpoints"):
        AsyncTransport()
    with pytest.raises(ConfigError, match=r"endpoints\.a"):
        AsyncTransport(endpoints={"a": "nowhere"})
    for wrong in (3, "http://a:1", ["nowhere"], [3]):
        with pytest.raises(ConfigError, match="endpoints"):
            AsyncTransport(endpoints=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both"):
        Transport({"endpoints": {"a": "http://a:1"}}, endpoints={"a": "http://a:1"})


# event loops, threads, processes


@pytest.fixture
def engines() -> Iterator[dict[str, str]]:
    """Two engines served by a loop of their own, in another thread."""
    from kvproxy.embed.lives import background

    there = background()
    serving = simulated_engines(2)
    endpoints = there.run(serving.__aenter__())
    yield endpoints
    there.run(serving.__aexit__(None, None, None))


def cached_tokens(answer: httpx.Response) -> int:
    """Tokens of the prompt that the engine had."""
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_client_in_another_event_loop_goes_on_with_what_was_learned(engines: dict[str, str]) -> None:
    """Each `asyncio.run` opens and closes a client; the second turn goes where the first one is."""
    transport = AsyncTransport(endpoints=engines)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.post(CHAT, json=BODY)

    answers = [asyncio.run(ask()) for _ in range(4)]
    assert [cached_tokens(one) > 0 for one in answers] == [False, True, True, True]


def test_one_event_loop_after_another(engines: dict[str, str]) -> None:
    """`asyncio.run` six times with one transport, without closing it: what was learned goes on, and sockets of the
    loops before are dropped."""
    transport = AsyncTransport(endpoints=engines)

    async def ask() -> int:
        return (await httpx.AsyncClient(transport=transport).post(CHAT, json=BODY)).status_code

    open_files = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a client that is not closed: of its sockets, as of httpx's
        for _ in range(6):
            assert asyncio.run(ask()) == 200
            gc.collect()
            open_files.append(len(os.listdir("/proc/self/fd")))
        transport = None  # type: ignore[assignment]
        gc.collect()
    assert open_files[-1] < open_files[0] + 4  # the engines close theirs a little later


def test_a_synchronous_client(engines: dict[str, str]) -> None:
    import openai  # takes a second

    transport = Transport(endpoints=engines)
    with httpx.Client(transport=transport, timeout=60.0) as http:
        client = openai.OpenAI(base_url="http://engines/v1", api_key="x", http_client=http)
        answer = client.chat.completions.create(model="sim", messages=BODY["messages"], max_tokens=4)
        assert answer.usage is not None
        stream = client.chat.completions.create(model="sim", messages=BODY["messages"], max_tokens=20, stream=True)
        assert sum(1 for _ in stream) > 2
        half = client.chat.completions.create(model="sim", messages=BODY["messages"], max_tokens=2000, stream=True)
        next(iter(half))
        assert transport.proxy.status()["requests"] == 1
        half.close()


async def test_a_proxy_ends_with_a_client_that_is_not_closed() -> None:
    """As sockets of httpx's own transport do; an answer that is still read keeps it."""
    async with simulated_engines(1) as endpoints:
        transport = AsyncTransport(endpoints=endpoints)
        client = httpx.AsyncClient(transport=transport, timeout=60.0)
        request = client.build_request("POST", CHAT, json=BODY | {"stream": True})
        answer = await client.send(request, stream=True)
        proxy = transport.proxy
        del client, transport
        gc.collect()
        assert b"[DONE]" in await answer.aread()
        assert proxy.status()["running"]
        del answer
        gc.collect()
        await until(lambda: not proxy.status()["running"])


def test_a_proxy_ends_with_a_synchronous_client_that_is_not_closed(engines: dict[str, str]) -> None:
    """Its thread goes on for others."""
    transport = Transport(endpoints=engines)
    client = httpx.Client(transport=transport, timeout=60.0)
    assert client.post(CHAT, json=BODY).status_code == 200
    proxy = transport.proxy
    assert proxy.status()["running"]
    del client, transport
    gc.collect()
    asyncio.run(until(lambda: not proxy.status()["running"]))


def test_a_forked_child_has_a_proxy_of_its_own(engines: dict[str, str]) -> None:
    """The parent's threads are not in the child; its connections go on in the parent."""
    transport = Transport(endpoints=engines)
    client = httpx.Client(transport=transport, timeout=60.0)
    assert client.post(CHAT, json=BODY).status_code == 200
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if client.post(CHAT, json=BODY).status_code == 200 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.post(CHAT, json=BODY).status_code == 200
    client.close()


@pytest.mark.slow
def test_a_process_ends_though_nothing_was_closed(engines: dict[str, str]) -> None:
    """Streams half read and clients left open hold neither threads nor the interpreter."""
    program = f"""
import httpx, kvproxy
client = httpx.Client(transport=kvproxy.Transport(endpoints={engines!r}), timeout=60.0)
request = client.build_request("POST", {CHAT!r}, json={BODY | {"stream": True, "max_tokens": 5000}!r})
answer = client.send(request, stream=True)
print(next(answer.iter_raw())[:5])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "b'data:'\n", "")
