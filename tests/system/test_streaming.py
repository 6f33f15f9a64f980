"""Streams pass through piece by piece, whatever the client's pace, and whole bodies pass untouched."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, reply, start_stream
from tests.support.proxy import chat, running_proxy


def chunk(text: str | None, **more: object) -> bytes:
    delta = {} if text is None else {"content": text}
    row = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
           "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}  # fmt: skip
    return json.dumps(row).encode()


async def test_each_event_arrives_before_the_next_is_sent() -> None:
    """Nothing waits for a buffer to fill: the engine sends event n+1 only after the client saw event n."""
    seen = asyncio.Event()

    async def stepwise(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        for number in range(5):
            await event(send, chunk(str(number)))
            await asyncio.wait_for(seen.wait(), 60)
            seen.clear()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    engine = FakeEngine("a", stepwise)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        texts = []
        async with proxy.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["delta"]["content"])
                    seen.set()
    assert texts == list("01234")


async def test_the_official_client_streams_through() -> None:
    """`openai` with nothing but its base_url changed, streaming and not; usage is read for the metrics."""
    import openai  # takes a second

    usage = {
        "prompt_tokens": 96,
        "completion_tokens": 2,
        "total_tokens": 98,
        "prompt_tokens_details": {"cached_tokens": 64},
    }

    async def engine_like(engine: FakeEngine, call: Call, send: Send) -> None:
        if not json.loads(call.body)["stream"]:
            message = {"role": "assistant", "content": "hi"}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            body = {
                "id": "c",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "usage": usage,
                "choices": choices,
            }
            await reply(send, 200, json.dumps(body).encode())
            return
        await start_stream(send)
        for text in ("h", "i"):
            await event(send, chunk(text))
        await event(send, chunk(None, choices=[], usage=usage))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    engine = FakeEngine("a", engine_like)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=False
            )
            assert whole.choices[0].message.content == "hi"
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            parts = [part async for part in stream]
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "hi"
        assert parts[-1].usage is not None
        assert proxy.metric("kvproxy_cached_tokens_total", cluster="default") == 128
        assert proxy.metric("kvproxy_prompt_tokens_total", cluster="default") == 192


async def test_a_broken_stream_raises_in_the_official_client() -> None:
    """The error event is one that `openai` turns into an exception, so that no half answer passes for a whole one."""
    import openai  # takes a second

    async def dies(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, chunk("half"))
        await asyncio.sleep(0.01)
        raise ConnectionAbortedError

    engine = FakeEngine("a", dies)
    async with (
        serve(engine) as url,
        running_proxy({"a": url}) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        with pytest.raises(openai.APIError, match="failed in the middle"):
            async for _ in stream:
                pass


async def test_an_engines_own_error_event_is_a_failure() -> None:
    """vLLM ends a stream so when its core dies: status 200, a clean end, and yet nothing to be proud of."""

    async def ends_with_error(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, chunk("half"))
        await asyncio.sleep(0.01)
        await event(send, b'{"error": {"message": "EngineCore encountered an issue"}}')
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    engine = FakeEngine("a", ends_with_error)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat(stream=True))
        assert '{"error": {"message": "EngineCore' in answer.text
        assert proxy.metric("kvproxy_request_ends_total", end="engine_error") == 1
        assert proxy.proxy.clusters["default"].endpoints[0].health.failures == 1


async def test_the_body_goes_up_byte_for_byte() -> None:
    """Odd spacing, key order and escapes included; bad JSON too."""
    engine = FakeEngine("a")
    bodies = [b'{ "messages" : [ ] ,"model":"m", "x":1.50e0, "y":"\\u00e9" }', b"{not json", b"", b"\xff\xfe"]
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        for body in bodies:
            await proxy.client.post("/v1/chat/completions?a=%20b", content=body)
    assert [call.body for call in engine.calls] == bodies
    assert {call.query for call in engine.calls} == {b"a=%20b"}


async def test_other_requests_pass_through() -> None:
    """Any path and method where all are public; a large streamed upload arrives whole."""
    engine = FakeEngine("a")

    async def pieces() -> object:
        for _ in range(64):
            yield b"x" * 10_000

    filters = [{"router": {"paths": "all"}}]
    async with (
        serve(engine) as url,
        running_proxy({"a": url}, filters=filters, policy="round_robin", shield="off") as proxy,
    ):
        await proxy.client.put("/files/a%2Fb", content=pieces())  # type: ignore[arg-type]
        await proxy.client.get("/files")
        await proxy.client.delete("/files/1")
    assert [(c.method, c.path) for c in engine.calls] == [
        ("PUT", "/files/a/b"),
        ("GET", "/files"),
        ("DELETE", "/files/1"),
    ]
    assert len(engine.calls[0].body) == 640_000


async def test_a_model_alias_reaches_the_engine_under_its_own_name() -> None:
    """Routes give clients names of their own."""
    engine = FakeEngine("a")
    routes = [{"model": "fast", "upstream_model": "Qwen/Qwen3-8B"}, {"model": "*"}]
    async with serve(engine) as url, running_proxy({"a": url}, routes=routes) as proxy:
        await proxy.client.post("/v1/chat/completions", json=chat(model="fast"))
        await proxy.client.post("/v1/chat/completions", json=chat(model="other"))
    assert [json.loads(call.body)["model"] for call in engine.calls] == ["Qwen/Qwen3-8B", "other"]


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    """413 in OpenAI's shape, before the 100 MB are sent; the engine hears nothing."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 413")
        assert b'"error"' in await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert not engine.calls


async def test_a_slow_reader_holds_the_engine_back() -> None:
    """64 MB wait in the engine, not in the proxy, while the client does not read."""
    sent = 0

    async def firehose(engine: FakeEngine, call: Call, send: Send) -> None:
        nonlocal sent
        await start_stream(send)
        for _ in range(1024):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent += 65536

    engine = FakeEngine("a", firehose)
    async with (
        serve(engine) as url,
        running_proxy({"a": url}) as proxy,
        proxy.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer,
    ):
        before = -1
        while sent != before:  # until the engine stands still
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 32 * 1024 * 1024
        assert answer.status_code == 200


async def test_models_of_all_endpoints_are_one_list() -> None:
    """Aliases included; an engine that fails is left out."""

    def lists(*names: str) -> object:
        async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
            rows = [{"id": name, "object": "model"} for name in names]
            await reply(send, 200, json.dumps({"object": "list", "data": rows}).encode())

        return behave

    engines = [FakeEngine("a", lists("m1", "m2")), FakeEngine("b", lists("m2", "m3"))]  # type: ignore[arg-type]
    routes = [{"model": "alias", "upstream_model": "m3"}, {"model": "m1", "upstream_model": "m3"}, {}]
    async with (
        serve(engines[0]) as a,
        serve(engines[1]) as b,
        running_proxy({"a": a, "b": b, "dead": "http://127.0.0.1:9"}, routes=routes) as proxy,
    ):
        answers = await asyncio.gather(*(proxy.client.get("/v1/models") for _ in range(20)))
        listed = answers[0].json()
        one = await proxy.client.get("/v1/models/alias")
        unknown = await proxy.client.get("/v1/models/nobody")
    assert sorted(row["id"] for row in listed["data"]) == ["alias", "m1", "m2", "m3"]
    assert one.json()["root"] == "m3"
    assert [row for row in listed["data"] if row["id"] == "m1"] == [{"id": "m1", "object": "model"}], "a real one stays"
    assert unknown.status_code == 404
    assert [len(engine.listings) for engine in engines] == [1, 1], "twenty clients, one question"


async def test_the_decision_is_told_when_asked() -> None:
    """`x-kvproxy-debug` gets the policy and the reason; without it the header is absent."""
    engine = FakeEngine("a", answer_ok)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        asked = await proxy.client.post("/v1/chat/completions", json=chat(), headers={"x-kvproxy-debug": "1"})
        plain = await proxy.client.post("/v1/chat/completions", json=chat())
    assert asked.headers["x-kvproxy-decision"].startswith("policy=round_robin; reason=")
    assert "x-kvproxy-decision" not in plain.headers
    assert plain.headers["x-kvproxy-endpoint"] == "a"
