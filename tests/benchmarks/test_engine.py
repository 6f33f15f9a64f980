"""The benchmarks' engine answers what routers ask as vLLM does: a wrong answer would flatter one of the measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from benchmarks.stub import Engine
from tests.cache.clients.support import FIXTURES


def captured(name: str) -> Any:
    """Return the real engine's answer."""
    for line in (FIXTURES / "vllm_http/api.jsonl").read_text().splitlines():
        call = json.loads(line)
        if call["name"] == name and call["status"] == 200:
            return json.loads(call["body"])
    raise LookupError(name)


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[httpx.AsyncClient]:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, httpx.AsyncClient(base_url=url) as client:
        yield client


def same_shape(ours: Any, real: Any) -> bool:
    """Return the same fields of the same kinds."""
    if isinstance(real, dict):
        return ours.keys() == real.keys() and all(same_shape(ours[key], real[key]) for key in real)
    return type(ours) is type(real)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_rendered_as_vllm_renders_it(stream: bool) -> None:
    """vllm-router's cache_aware asks it for the tokens of every prompt, streamed or not."""
    body = {"model": "bench", "messages": [{"role": "user", "content": "lorem ipsum " * 200}], "stream": stream}
    async with engine() as client:
        answer = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert same_shape(answer, captured("chat_render"))
    assert len(answer["token_ids"]) > 500
    assert all(isinstance(each, int) for each in answer["token_ids"])


async def test_a_completion_is_rendered_as_a_list() -> None:
    """One for each prompt."""
    async with engine() as client:
        answer = (await client.post("/v1/completions/render", json={"prompt": "Hello world"})).json()
    assert len(answer) == 1
    assert same_shape(answer[0], captured("compl_render")[0])


async def test_prompts_share_tokens_as_far_as_they_are_alike() -> None:
    """Else a router that compares tokens would find nothing, or everything."""
    async with engine() as client:
        asked = [
            await client.post("/v1/completions/render", content=b"x" * 400 + end) for end in (b"a" * 40, b"b" * 40)
        ]
    one, other = (answer.json()[0]["token_ids"] for answer in asked)
    assert one[:100] == other[:100]
    assert one[100:] != other[100:]


async def test_everything_else_is_answered_as_before() -> None:
    """A completion, an engine's health, a stream."""
    async with engine() as client:
        assert (await client.get("/health")).status_code == 200
        chat = await client.post("/v1/chat/completions", json={"model": "bench", "messages": []})
        streamed = await client.post("/v1/chat/completions", json={"model": "bench", "messages": [], "stream": True})
    assert chat.json()["usage"]["prompt_tokens"] == 500
    assert streamed.text.endswith("data: [DONE]\n\n")
