"""Blame for a failure: an engine, all of them, or the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from starlette.types import Send

from kvproxy import app
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cluster.endpoint import Condition
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.verdicts import Verdicts
from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Behaviour, Call, FakeEngine, answer_ok, event, reply, start_stream
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.scripted import answer, scripted
from tests.support.until import until

#: A client's mistake, found when the status had gone out, as each engine says it.
CLIENT_MISTAKES = [
    pytest.param(b'data: {"error": {"message": "x", "type": "BadRequestError", "code": 400}}', id="vllm"),
    pytest.param(b'data: {"error":{"object":"error","message":"x","code":"400"}}', id="string"),
    pytest.param(b'data: {"object": "error", "message": "x", "type": "BadRequestError", "code": 400}', id="flat"),
    pytest.param(b'data:{"error":"Input validation error","error_type":"validation"}', id="tgi"),
    pytest.param(b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error"}}', id="anthropic"),
    pytest.param(b'event: error\r\ndata: {"type":"error","error":{"type":"rate_limit_error"}}', id="anthropic crlf"),
    pytest.param(b'event: error\ndata: {"type":"error","code":"context_length_exceeded"}', id="responses"),
]


def stream_of(*events: bytes) -> Behaviour:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        for one in events:
            await send({"type": "http.response.body", "body": one + b"\n\n", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    return behave


def status(code: int) -> Behaviour:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, code, b'{"error":{"message":"boom"}}')

    return behave


async def die(engine: FakeEngine, call: Call, send: Send) -> None:
    raise ConnectionAbortedError


@contextlib.asynccontextmanager
async def fleet(behave: Behaviour, **config: Any) -> AsyncIterator[tuple[list[FakeEngine], RunningProxy]]:
    """Three engines that all do the same."""
    engines = [FakeEngine(name, behave) for name in "abc"]
    async with contextlib.AsyncExitStack() as stack:
        urls = {engine.name: await stack.enter_async_context(serve(engine)) for engine in engines}
        yield engines, await stack.enter_async_context(running_proxy(urls, **config))


def conditions(proxy: RunningProxy) -> set[Condition]:
    now = asyncio.get_running_loop().time()
    return {endpoint.condition(now) for endpoint in proxy.proxy.clusters["default"].endpoints}


def attempts(engines: list[FakeEngine]) -> int:
    return sum(len(engine.calls) for engine in engines)


async def ask(proxy: RunningProxy, times: int, **fields: Any) -> list[int]:
    path = "/v1/chat/completions"
    return [(await proxy.client.post(path, json=chat(**fields))).status_code for _ in range(times)]


@pytest.mark.parametrize("mistake", CLIENT_MISTAKES)
@pytest.mark.parametrize("before", [(), (b'data: {"choices":[]}',), (b": keep-alive",)], ids=["first", "late", "alive"])
async def test_a_clients_mistake_inside_a_stream_is_its_own(mistake: bytes, before: tuple[bytes, ...]) -> None:
    """As with a plain 400: one attempt, no engine suffers, and the client gets the event as it came."""
    async with fleet(stream_of(*before, mistake)) as (engines, proxy):
        answers = [await proxy.client.post("/v1/chat/completions", json=chat(stream=True)) for _ in range(12)]
        assert all(mistake in one.content for one in answers)
        assert conditions(proxy) == {Condition.UP}
        assert all(one.health.failures == 0 for one in proxy.proxy.clusters["default"].endpoints)
        assert proxy.metric("kvproxy_request_ends_total", end="engine_error") == 0
    assert attempts(engines) == 12


POISON = {
    "500": status(500),
    "disconnect": die,
    "first event": stream_of(b'data: {"error": {"message": "x", "code": 500}}'),
    "late event": stream_of(b'data: {"choices":[]}', b'data: {"error": {"message": "x", "code": 500}}'),
    "anthropic": stream_of(b'event: error\ndata: {"type":"error","error":{"type":"api_error"}}'),
}


@pytest.mark.parametrize("behave", POISON.values(), ids=POISON)
async def test_a_failure_on_every_engine_ejects_none(behave: Behaviour) -> None:
    """A request that no engine survives says nothing about any of them."""
    async with fleet(behave) as (_, proxy):
        await ask(proxy, 40, stream=True)
        assert conditions(proxy) == {Condition.UP}


async def test_poison_between_good_requests_ejects_none() -> None:
    """Also when the budget gives most of them no second attempt."""

    async def picky(engine: FakeEngine, call: Call, send: Send) -> None:
        await (status(500) if b"poison" in call.body else answer_ok)(engine, call, send)

    async with fleet(picky, retry={"budget": 0.2, "min_per_second": 0.2}) as (_, proxy):
        await ask(proxy, 10)
        for _ in range(20):
            assert await ask(proxy, 3, content="poison") == [500] * 3
            assert await ask(proxy, 1) == [200]
        assert conditions(proxy) == {Condition.UP}


async def test_connections_that_are_all_taken_say_nothing_about_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is our own: requests beyond it are refused, and the engine stays in rotation."""
    answered = asyncio.Event()

    async def slow(engine: FakeEngine, call: Call, send: Send) -> None:
        await answered.wait()
        await answer_ok(engine, call, send)

    engine = FakeEngine("a", slow)
    monkeypatch.setattr(app, "UpstreamPool", partial(UpstreamPool, max_waiting=0))
    few = {"pool": {"max_connections": 1}, "retry": {"attempts": 1}}
    async with serve(engine) as url, running_proxy({"a": url}, **few) as proxy:
        first = asyncio.create_task(ask(proxy, 1))
        await until(lambda: bool(engine.calls))
        assert await ask(proxy, 6) == [503] * 6
        (only,) = proxy.proxy.clusters["default"].endpoints
        assert (conditions(proxy), only.health.failures) == ({Condition.UP}, 0)
        assert proxy.metric("kvproxy_attempt_failures_total", cluster="default", endpoint="a", reason="pool_full") == 6
        answered.set()
        assert await first == [200]


@pytest.mark.parametrize("code", [400, 404, 422, 499])
async def test_refusals_teach_nothing_about_an_engines_speed(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not prefill: any 4xx is the client's error, and neither a success nor a failure."""
    outcomes: list[AttemptOutcome] = []

    def record(self: Verdicts, engine: Engine, outcome: AttemptOutcome, now: float) -> None:
        outcomes.append(outcome)

    monkeypatch.setattr(Verdicts, "record_outcome", record)
    async with fleet(status(code)) as (_, proxy):
        assert await ask(proxy, 1) == [code]
    assert outcomes == [AttemptOutcome.CLIENT_ERROR]


async def test_an_engine_that_alone_fails_is_ejected() -> None:
    """Others served what it failed: that is proof."""
    async with fleet(answer_ok) as (engines, proxy):
        engines[0].behave = status(500)
        assert set(await ask(proxy, 12)) == {200}
        assert conditions(proxy) == {Condition.UP, Condition.EJECTED}
        assert len(engines[0].calls) == 3


@pytest.mark.parametrize("behave", [status(500), status(503), die], ids=["500", "503", "dead"])
async def test_a_total_outage_is_hardly_multiplied(behave: Behaviour) -> None:
    """At most 1.2 attempts a request, however few requests there are; and retries are back when an engine is."""
    async with fleet(behave) as (engines, proxy):
        await ask(proxy, 10)
        assert attempts(engines) <= 12
        assert proxy.metric("kvproxy_retries_refused_total", reason="outage") > 0
        engines[0].behave = answer_ok
        await ask(proxy, 3)  # a request that gets there proves that it is over
        assert set(await ask(proxy, 6)) == {200}


async def test_nothing_is_retried_while_every_endpoint_is_out() -> None:
    """Verdicts of the probes count as well: the very first request is sent once."""
    probes = {"active": True, "interval": "5ms", "unhealthy_threshold": 1}
    async with fleet(status(500), health=probes) as (engines, proxy):
        for engine in engines:
            engine.healthy = False
        await until(lambda: conditions(proxy) == {Condition.UNHEALTHY})
        await ask(proxy, 1)
    assert attempts(engines) == 1


async def test_an_error_event_in_two_pieces_is_one() -> None:
    """The network may cut it anywhere."""
    halves = (b'data: {"error": {"message": "x", ', b'"code": 500}}\n\n')

    async def slowly(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        for half in halves:
            await send({"type": "http.response.body", "body": half, "more_body": True})
            await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b""})

    async with fleet(answer_ok) as (engines, proxy):
        engines[0].behave = slowly
        answers = [await proxy.client.post("/v1/chat/completions", json=chat(stream=True)) for _ in range(3)]
        assert not [answer for answer in answers if b"error" in answer.content]


async def stall_in_a_500(engine: FakeEngine, call: Call, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error":', "more_body": True})
    await call.gone.wait()


async def stall_in_an_error_event(engine: FakeEngine, call: Call, send: Send) -> None:
    await start_stream(send)
    await event(send, b'{"error": {"message": "boom", "code": 500}}')
    await call.gone.wait()


@pytest.mark.parametrize("behave", [stall_in_a_500, stall_in_an_error_event])
async def test_an_error_whose_body_stalls_is_retried(behave: Behaviour) -> None:
    """It is known to be an error; the rest of its text is not worth `timeouts.idle`."""
    async with fleet(answer_ok) as (engines, proxy):
        engines[0].behave = behave
        assert await ask(proxy, 3) == [200] * 3
    await engines[0].calls[0].gone.wait()


async def test_an_error_whose_body_stalls_is_given_as_far_as_it_came() -> None:
    """If no other engine does better: a whole response with what there is."""
    engine = FakeEngine("a", stall_in_a_500)
    async with serve(engine) as url, running_proxy({"a": url}, retry={"attempts": 1}) as proxy:
        response = await proxy.client.post("/v1/chat/completions", json=chat())
    assert (response.status_code, response.content) == (500, b'{"error":')


async def test_status_000_is_no_interim_response() -> None:
    """It is not HTTP, and is answered at once and not at the first-byte timeout."""
    nothing = answer(b"HTTP/1.1 000 Nothing\r\ncontent-length: 0\r\n\r\n")
    async with scripted(nothing) as upstream, running_proxy({"a": str(upstream.origin)}) as proxy:
        response = await proxy.client.post("/v1/chat/completions", json=chat())
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "protocol_error"


async def test_interim_responses_without_end_are_bounded_by_the_first_byte_timeout() -> None:
    """They are no byte of an answer."""

    async def interim(peer: Any) -> None:
        await peer.request()
        while True:
            await peer.send(b"HTTP/1.1 102 Processing\r\n\r\n")
            await asyncio.sleep(0.01)

    async with scripted(interim) as upstream:
        timeouts = {"first_byte": "200ms"}
        async with running_proxy({"a": str(upstream.origin)}, timeouts=timeouts, retry={"attempts": 1}) as proxy:
            response = await proxy.client.post("/v1/chat/completions", json=chat())
    assert response.status_code == 504


def large_head(size_bytes: int) -> Behaviour:
    """As vLLM answers embeddings with `encoding_format: bytes`: the index of the items is in a header field."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream"), (b"metadata", b"m" * size_bytes)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"\x00\x01"})

    return behave


async def test_a_response_head_of_70_kb_goes_to_the_client() -> None:
    """Binary embeddings of 600 inputs have one."""
    async with fleet(large_head(70_000)) as (engines, proxy):
        embedded = await proxy.client.post("/v1/embeddings", json={"model": "m", "input": ["a"] * 600})
        assert (embedded.status_code, len(embedded.headers["metadata"])) == (200, 70_000)
        assert embedded.content == b"\x00\x01"
    assert attempts(engines) == 1


async def test_a_response_head_over_the_bound_blames_no_engine() -> None:
    """It would be the same on every engine: one attempt, a 502, nothing ejected."""
    async with fleet(large_head(1_100_000)) as (engines, proxy):
        for _ in range(12):
            embedded = await proxy.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
            assert embedded.status_code == 502
            assert embedded.json()["error"]["code"] == "response_head_too_large"
        assert conditions(proxy) == {Condition.UP}
        assert all(one.health.failures == 0 for one in proxy.proxy.clusters["default"].endpoints)
    assert attempts(engines) == 12


async def test_501_is_the_requests_fault() -> None:
    """It is handed on as it is, after one attempt, and ejects nothing."""
    engine = FakeEngine("a", status(501))
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        assert await ask(proxy, 6) == [501] * 6
        assert conditions(proxy) == {Condition.UP}
    assert len(engine.calls) == 6


async def test_a_500_that_one_client_gets_ejects_no_engine_and_of_several_clients_does() -> None:
    """Nothing else shows whether the engine or the request is broken where no other engine can be asked."""
    keys = {"auth": {"keys": [{"name": "one", "key": "key-one"}, {"name": "two", "key": "key-two"}]}}
    engine = FakeEngine("a", status(500))
    filters = [{"auth": keys["auth"]}, "inference_request", "router"]
    async with serve(engine) as url, running_proxy({"a": url}, filters=filters, retry={"attempts": 1}) as proxy:

        async def fail(key: str) -> None:
            headers = {"authorization": f"Bearer {key}"}
            answered = await proxy.client.post("/v1/chat/completions", json=chat(), headers=headers)
            assert answered.status_code == 500

        for _ in range(12):
            await fail("key-one")
        assert conditions(proxy) == {Condition.UP}
        for _ in range(6):
            await fail("key-two")
        assert conditions(proxy) == {Condition.EJECTED}
