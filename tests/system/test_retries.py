"""Another endpoint before the first byte; never a second answer after it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, reply, start_stream
from tests.support.ports import free_port
from tests.support.proxy import chat, running_proxy

BUSY = b'{"error":{"message":"The engine is currently busy","type":"Service Unavailable","param":null,"code":503}}'


async def answer_500(engine: FakeEngine, call: Call, send: Send) -> None:
    await reply(send, 500, b'{"error":{"message":"boom"}}')


async def answer_busy(engine: FakeEngine, call: Call, send: Send) -> None:
    await reply(send, 503, BUSY)


async def answer_400(engine: FakeEngine, call: Call, send: Send) -> None:
    await reply(send, 400, b'{"error":{"message":"bad temperature"}}')


async def die_after_the_head(engine: FakeEngine, call: Call, send: Send) -> None:
    """vLLM sends its 200 at once and the data only after the prefill; this one dies in between."""
    await start_stream(send)
    raise ConnectionAbortedError


async def answer_as_asked(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer with a stream if requested."""
    if b'"stream":true' not in call.body:
        await answer_ok(engine, call, send)
        return
    await start_stream(send)
    await event(send, b'{"served_by":"%s"}' % engine.name.encode())
    await event(send, b"[DONE]")
    await send({"type": "http.response.body", "body": b""})


async def error_as_first_event(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer as vLLM does when its engine core dies during the prefill."""
    await start_stream(send)
    await event(send, b'{"error": {"message": "EngineCore encountered an issue","code":500}}')
    await event(send, b"[DONE]")
    await send({"type": "http.response.body", "body": b""})


def closed_port() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("broken", [answer_500, answer_busy, die_after_the_head, error_as_first_event])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_is_served_elsewhere(broken: Any, stream: bool) -> None:
    """The client sees one good answer and never learns of the first attempt."""
    bad, good = FakeEngine("bad", broken), FakeEngine("good", answer_as_asked)
    async with serve(bad) as bad_url, serve(good) as good_url, running_proxy({"a": bad_url, "b": good_url}) as proxy:
        for _ in range(2):  # round robin: one of the two starts at the broken engine
            answer = await proxy.client.post("/v1/chat/completions", json=chat(stream=stream))
            assert answer.status_code == 200
            assert b'"served_by":"good"' in answer.content
    assert len(bad.calls) == 1
    assert bad.calls[0].body == good.calls[0].body


async def test_a_stream_is_announced_before_its_first_event() -> None:
    """The head goes down as soon as the engine has sent it: clients and proxies see that the request was taken."""
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await go_on.wait()
        await event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async with serve(FakeEngine("a", slow)) as url, running_proxy({"a": url}) as proxy:
        body = chat(stream=True)
        async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            go_on.set()
            assert await answer.aread() == b"data: [DONE]\n\n"


@pytest.mark.parametrize(("second", "told"), [(answer_500, b"status_500"), (die_after_the_head, b"disconnected")])
async def test_an_announced_stream_that_no_engine_can_go_on_with_ends_with_an_error(second: Any, told: bytes) -> None:
    """Its status went out already, so the failure is an event of the stream."""
    async with (
        serve(FakeEngine("a", die_after_the_head)) as a,
        serve(FakeEngine("b", second)) as b,
        running_proxy({"a": a, "b": b}) as proxy,
    ):
        path, body = "/v1/chat/completions", chat(stream=True)
        answers = [await proxy.client.post(path, json=body) for _ in range(2)]  # round robin: each engine is first once
    announced = [answer.content for answer in answers if answer.status_code == 200]
    assert any(told in content for content in announced)
    assert all(content.startswith(b"data: ") and content.endswith(b"data: [DONE]\n\n") for content in announced)


async def test_a_refused_connection_is_served_elsewhere() -> None:
    """A dead engine costs its clients nothing."""
    good = FakeEngine("good")
    async with serve(good) as url, running_proxy({"dead": closed_port(), "b": url}) as proxy:
        statuses = [(await proxy.client.post("/v1/completions", json={"prompt": "x"})).status_code for _ in range(6)]
        assert statuses == [200] * 6
        assert proxy.metric("kvproxy_retries_total", reason="connect_error") >= 1


async def test_when_every_endpoint_fails_the_engines_own_answer_is_given() -> None:
    """The last 5xx, body and headers, rather than one of ours."""
    engines = [FakeEngine(name, answer_500) for name in "ab"]
    retry = {"attempts": 3}
    async with (
        serve(engines[0]) as a,
        serve(engines[1]) as b,
        running_proxy({"a": a, "b": b}, retry=retry) as proxy,
    ):
        answer = await proxy.client.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "boom"
    assert sum(len(engine.calls) for engine in engines) == 3


async def test_an_error_answer_that_stalls_is_given_as_far_as_it_came() -> None:
    """Whole for the client: the length that the engine announced is not said again."""
    answered = asyncio.Event()

    async def stall(engine: FakeEngine, call: Call, send: Send) -> None:
        head = [(b"content-type", b"application/json"), (b"content-length", b"500")]
        await send({"type": "http.response.start", "status": 500, "headers": head})
        await send({"type": "http.response.body", "body": b'{"error":{}}', "more_body": True})
        await answered.wait()

    async with serve(FakeEngine("a", stall)) as url, running_proxy({"a": url}, retry={"attempts": 1}) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat())
        answered.set()
    assert (answer.status_code, answer.content) == (500, b'{"error":{}}')


async def test_the_engines_answer_stands_when_no_other_is_left_to_ask() -> None:
    """The one endpoint was drained while it failed: what it said is of more use than that there is none."""
    drain: list[Any] = []

    async def fail_at_the_end(engine: FakeEngine, call: Call, send: Send) -> None:
        drain[0]()
        await answer_500(engine, call, send)

    retry = {"attempts": 2}
    async with (
        serve(FakeEngine("a", fail_at_the_end)) as url,
        running_proxy({"a": url}, retry=retry) as proxy,
    ):
        cluster = proxy.proxy.clusters["default"]
        drain.append(lambda: cluster.operator.drain_endpoint(cluster.endpoints[0].id))
        answer = await proxy.client.post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "boom")
        answer = await proxy.client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503


async def test_an_error_answer_that_is_too_long_to_hold_goes_down() -> None:
    """An engine that reports at length takes no more of our memory than one that does not; it is not asked again."""
    go_on = asyncio.Event()

    async def answer_at_length(engine: FakeEngine, call: Call, send: Send) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"200000")]})
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"x" * 100_000})

    bad = [FakeEngine(name, answer_at_length) for name in "ab"]
    async with (
        serve(bad[0]) as a,
        serve(bad[1]) as b,
        running_proxy({"a": a, "b": b}) as proxy,
        proxy.client.stream("POST", "/v1/chat/completions", json=chat()) as answer,
    ):
        go_on.set()
        assert (answer.status_code, len(await answer.aread())) == (500, 200_000)
    assert sum(len(engine.calls) for engine in bad) == 1


async def test_client_errors_are_never_retried() -> None:
    """A 400 is the client's to fix, and no engine's health suffers."""
    engines = [FakeEngine(name, answer_400) for name in "ab"]
    async with serve(engines[0]) as a, serve(engines[1]) as b, running_proxy({"a": a, "b": b}) as proxy:
        answers = [await proxy.client.post("/v1/chat/completions", json=chat()) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {400}
        assert all(endpoint.health.failures == 0 for endpoint in proxy.proxy.clusters["default"].endpoints)
    assert sum(len(engine.calls) for engine in engines) == 8


async def test_no_retry_beyond_the_budget() -> None:
    """When everything fails, the proxy does not multiply the load on it."""
    engines = [FakeEngine(name, answer_500) for name in "ab"]
    retry = {"attempts": 3, "budget": 0, "min_per_second": 0}
    async with (
        serve(engines[0]) as a,
        serve(engines[1]) as b,
        running_proxy({"a": a, "b": b}, retry=retry) as proxy,
    ):
        for _ in range(3):
            assert (await proxy.client.post("/v1/chat/completions", json=chat())).status_code == 500
        assert proxy.metric("kvproxy_retries_refused_total", reason="budget") == 3
    assert sum(len(engine.calls) for engine in engines) == 3


async def test_requests_that_need_no_retry_earn_the_budget_of_those_that_do() -> None:
    """Two retries for four good requests at a share of a half."""
    engines = [FakeEngine(name) for name in "ab"]
    retry = {"budget": 0.5, "min_per_second": 0}
    async with (
        serve(engines[0]) as a,
        serve(engines[1]) as b,
        running_proxy({"a": a, "b": b}, retry=retry) as proxy,
    ):
        for _ in range(4):
            await proxy.client.post("/v1/chat/completions", json=chat())
        engines[0].behave = answer_500
        statuses = [(await proxy.client.post("/v1/chat/completions", json=chat())).status_code for _ in range(4)]
        assert statuses == [200] * 4


async def test_other_requests_are_not_repeated_after_processing() -> None:
    """A POST of unknown meaning may have had its effect."""
    engines = [FakeEngine(name, answer_500) for name in "ab"]
    async with serve(engines[0]) as a, serve(engines[1]) as b, running_proxy({"a": a, "b": b}) as proxy:
        assert (await proxy.client.post("/v1/rerank", content=b"x")).status_code == 500
    assert sum(len(engine.calls) for engine in engines) == 1


async def test_a_break_after_the_first_byte_is_told_and_not_retried() -> None:
    """An SSE client gets an error event it understands; the reason is counted."""

    async def dies(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b'{"choices":[{"delta":{"content":"one"}}]}')
        await asyncio.sleep(0.01)
        raise ConnectionAbortedError

    engines = [FakeEngine(name, dies) for name in "ab"]
    async with serve(engines[0]) as a, serve(engines[1]) as b, running_proxy({"a": a, "b": b}) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat(stream=True))
        assert answer.status_code == 200
        events = [line for line in answer.text.split("\n\n") if line]
        assert '"content":"one"' in events[0]
        assert '"error"' in events[1]
        assert '"upstream_disconnected"' in events[1]
        assert events[2] == "data: [DONE]"
        assert proxy.metric("kvproxy_request_ends_total", end="upstream_died") == 1
    assert sum(len(engine.calls) for engine in engines) == 1


async def test_credentials_stay_with_their_endpoint() -> None:
    """The second attempt carries the second endpoint's key, or the client's own where it has none."""
    bad, good = FakeEngine("bad", answer_500), FakeEngine("good")
    async with serve(bad) as bad_url, serve(good) as good_url:
        own: list[dict[str, Any]] = [{"id": "a", "url": bad_url, "api_key": "key-of-a"}, {"id": "b", "url": good_url}]
        async with running_proxy(own) as proxy:
            headers = {"authorization": "Bearer client"}
            await proxy.client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert bad.calls[0].header("authorization") == "Bearer key-of-a"
    assert good.calls[0].header("authorization") == "Bearer client"


async def test_an_engine_that_never_answers_gives_504() -> None:
    """The first-byte timeout bounds the wait on each endpoint."""

    async def silent(engine: FakeEngine, call: Call, send: Send) -> None:
        await call.gone.wait()

    engine = FakeEngine("a", silent)
    async with (
        serve(engine) as url,
        running_proxy({"a": url}, timeouts={"first_byte": "50ms"}, retry={"attempts": 1}) as proxy,
    ):
        answer = await proxy.client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "first_byte_timeout"


async def test_no_endpoint_at_all_gives_503_with_retry_after() -> None:
    """And it says so in OpenAI's shape."""
    engine = FakeEngine("a", answer_ok)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        proxy.proxy.clusters["default"].operator.drain_endpoint("a")  # type: ignore[arg-type]
        answer = await proxy.client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "draining"
    assert not engine.calls


async def test_an_endpoints_own_retries_come_first() -> None:
    """`retry.attempts` of an endpoint are made on it in a row, then the next endpoint is tried."""
    bad, good = FakeEngine("bad", answer_500), FakeEngine("good")
    own = {"attempts": 3, "backoff": "1ms"}
    async with serve(bad) as bad_url, serve(good) as good_url:
        endpoints = [{"id": "a", "url": bad_url, "retry": own}, {"id": "b", "url": good_url}]
        async with running_proxy(endpoints, retry={"attempts": 5}) as proxy:
            answer = await proxy.client.post("/v1/chat/completions", json=chat())
    assert answer.json()["served_by"] == "good"
    assert (len(bad.calls), len(good.calls)) == (3, 1)


async def test_without_fallback_an_endpoints_failure_is_the_answer() -> None:
    """Some operators prefer an error to another engine."""
    bad, good = FakeEngine("bad", answer_500), FakeEngine("good")
    own = {"attempts": 2, "backoff": "1ms", "fallback": False}
    async with serve(bad) as bad_url, serve(good) as good_url:
        endpoints = [{"id": "a", "url": bad_url, "retry": own}, {"id": "b", "url": good_url}]
        async with running_proxy(endpoints, retry={"attempts": 5}) as proxy:
            answer = await proxy.client.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 500
    assert (len(bad.calls), len(good.calls)) == (2, 0)
