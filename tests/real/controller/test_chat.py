"""OpenAI traffic through kvproxy to real engines."""

from __future__ import annotations

import openai
import pytest

from tests.real.conftest import Saw
from tests.real.pair import Pair
from tests.real.prompts import chat, text
from tests.support.proxy import running_proxy

pytestmark = pytest.mark.real


async def test_the_official_client_streams_what_it_gets_whole(pair: Pair, saw: Saw) -> None:
    """`openai` with nothing but its base_url changed: the streamed text is the text of the unstreamed answer."""
    question = [{"role": "user", "content": text(40, seed="official")}]
    async with (
        running_proxy(pair.urls) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"model": pair.model.name, "messages": question, "max_tokens": 24, "temperature": 0}
        raw = await client.chat.completions.with_raw_response.create(**asked)
        whole = raw.parse()
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        parts = [part async for part in stream]
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 24
    assert {raw.headers["x-kvproxy-endpoint"], stream.response.headers["x-kvproxy-endpoint"]} == {"a", "b"}
    saw(f"24 tokens in {len(parts)} events from the second engine, equal to the first engine's whole answer")


async def test_every_inference_api_passes(pair: Pair, saw: Saw) -> None:
    """Completions, responses and Anthropic messages reach the engine and count their tokens as well."""
    words = text(60, seed="apis")
    anthropic = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    asked = {
        "/v1/completions": {"prompt": words, "max_tokens": 4},
        "/v1/responses": {"input": words, "max_output_tokens": 4},
        "/v1/messages": {"messages": [{"role": "user", "content": words}], "max_tokens": 4},
    }
    counted = {}
    async with running_proxy(pair.urls) as proxy:
        for path, body in asked.items():
            before = proxy.metric("kvproxy_prompt_tokens_total", cluster="default")
            answer = await proxy.client.post(path, json={"model": pair.model.name, **body})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            told = usage.get("prompt_tokens") or sum(usage.get(name, 0) for name in anthropic)
            counted[path] = proxy.metric("kvproxy_prompt_tokens_total", cluster="default") - before
            assert counted[path] == told > 100
    saw(", ".join(f"{path}: {tokens:.0f} prompt tokens" for path, tokens in counted.items()))


async def test_cached_tokens_are_read(pair: Pair, saw: Saw) -> None:
    """The engine's `cached_tokens` arrive in kvproxy's metrics, from whole answers and from streams."""
    body = chat(pair.model.name, text(300, seed="metrics"))
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with running_proxy({"a": pair.a.url}) as proxy:
        cold = (await proxy.client.post("/v1/chat/completions", json=body)).json()["usage"]
        warm = (await proxy.client.post("/v1/chat/completions", json=body)).json()["usage"]
        await proxy.client.post("/v1/chat/completions", json=streamed)
        counted = proxy.metric("kvproxy_cached_tokens_total", cluster="default")
        prompts = proxy.metric("kvproxy_prompt_tokens_total", cluster="default")
    cached = warm["prompt_tokens_details"]["cached_tokens"]
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached > 0.9 * warm["prompt_tokens"]
    assert counted == 2 * cached
    assert prompts == 3 * warm["prompt_tokens"]
    saw(f"{cached} of {warm['prompt_tokens']} tokens cached on the second and third request; counted {counted:.0f}")


async def test_an_engines_refusal_is_the_clients_answer(pair: Pair, saw: Saw) -> None:
    """400 and 404 arrive as vLLM wrote them, are not tried elsewhere, and no endpoint is blamed."""
    async with running_proxy(pair.urls) as proxy:
        unknown = await proxy.client.post("/v1/chat/completions", json=chat("nobody", "x"))
        too_long = await proxy.client.post(
            "/v1/chat/completions", json=chat(pair.model.name, text(10_000, seed="too long"))
        )
        failures = [endpoint.health.failures for endpoint in proxy.proxy.clusters["default"].endpoints]
        retries = proxy.metric("kvproxy_retries_total", reason="status_5xx")
    assert (unknown.status_code, too_long.status_code) == (404, 400)
    assert "nobody" in unknown.json()["error"]["message"]
    assert (failures, retries) == ([0, 0], 0)
    saw(f"404 {unknown.json()['error']['type']}, 400 {too_long.json()['error']['type']}; nobody blamed")


async def test_the_models_of_both_engines_are_one_list(pair: Pair, saw: Saw) -> None:
    """`/v1/models` merges what the engines say."""
    async with running_proxy(pair.urls) as proxy:
        rows = (await proxy.client.get("/v1/models")).json()["data"]
    assert [row["id"] for row in rows] == [pair.model.name]
    assert rows[0]["max_model_len"] == pair.model.max_tokens
    saw(f"one model, {rows[0]['id']}, {rows[0]['max_model_len']} tokens")
