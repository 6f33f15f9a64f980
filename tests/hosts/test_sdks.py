"""SDKs whose HTTP client is given our transport: answers, streams, and streams that are closed early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import pytest
from starlette.types import Send

import kvproxy
from kvproxy.proxy.listener.server import Server
from kvproxy.testing import simulated_engines
from tests.support.fake_engine import Call, FakeEngine, event, start_stream

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
PROMPT = "a long beginning " * 80
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
URL = "http://engines/v1"

#: Makes what asks by this client: a whole answer's text, and a stream of pieces.
Asking = tuple[Callable[[], Awaitable[str]], Callable[[], AsyncIterator[Any]]]


def ask_openai(http: Any) -> Asking:
    openai = pytest.importorskip("openai")
    create = openai.AsyncOpenAI(base_url=URL, api_key="x", http_client=http).chat.completions.create

    async def whole() -> str:
        answer = await create(model="sim", messages=MESSAGES, max_tokens=5)
        return str(answer.choices[0].message.content)

    async def stream() -> AsyncIterator[Any]:
        async with await create(model="sim", messages=MESSAGES, max_tokens=5, stream=True) as pieces:
            async for piece in pieces:
                yield piece

    return whole, stream


def ask_anthropic(http: Any) -> Asking:
    anthropic = pytest.importorskip("anthropic")
    messages = anthropic.AsyncAnthropic(base_url="http://engines", api_key="x", http_client=http).messages

    async def whole() -> str:
        answer = await messages.create(model="sim", messages=MESSAGES, max_tokens=5)
        return str(answer.content[0].text)

    async def stream() -> AsyncIterator[Any]:
        async with messages.stream(model="sim", messages=MESSAGES, max_tokens=5) as pieces:
            async for piece in pieces:
                yield piece

    return whole, stream


def ask_langchain(http: Any) -> Asking:
    module = pytest.importorskip("langchain_openai")
    chat = module.ChatOpenAI(model="sim", base_url=URL, api_key="x", http_async_client=http, max_tokens=5)

    async def whole() -> str:
        return str((await chat.ainvoke(PROMPT)).content)

    return whole, lambda: chat.astream(PROMPT)


def ask_pydantic_ai(http: Any) -> Asking:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("sim", provider=OpenAIProvider(base_url=URL, api_key="x", http_client=http)))

    async def whole() -> str:
        return str((await agent.run(PROMPT, model_settings={"max_tokens": 5})).output)

    async def stream() -> AsyncIterator[Any]:
        async with agent.run_stream(PROMPT, model_settings={"max_tokens": 5}) as run:
            async for piece in run.stream_text(debounce_by=None):
                yield piece

    return whole, stream


def ask_instructor(http: Any) -> Asking:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=URL, api_key="x", http_client=http)
    create = instructor.from_openai(client, mode=instructor.Mode.JSON).chat.completions.create

    async def whole() -> str:
        answer = await create(model="sim", messages=MESSAGES, max_tokens=5, response_model=None)
        return str(answer.choices[0].message.content)

    async def stream() -> AsyncIterator[Any]:
        pieces = await create(model="sim", messages=MESSAGES, max_tokens=5, response_model=None, stream=True)
        async with pieces:
            async for piece in pieces:
                yield piece

    return whole, stream


def ask_llama_index(http: Any) -> Asking:
    module = pytest.importorskip("llama_index.llms.openai_like")
    options = {"api_key": "x", "is_chat_model": True, "max_tokens": 5, "context_window": 8000}
    model = module.OpenAILike(model="sim", api_base=URL, async_http_client=http, **options)

    async def whole() -> str:
        return str((await model.acomplete(PROMPT)).text)

    async def stream() -> AsyncIterator[Any]:
        async for piece in await model.astream_complete(PROMPT):
            yield piece

    return whole, stream


SDKS = (ask_openai, ask_anthropic, ask_langchain, ask_pydantic_ai, ask_instructor, ask_llama_index)
#: SDKs that refuse clients of the other library.
LIBRARIES = {ask_anthropic: httpx2, ask_pydantic_ai: httpx2}


@asynccontextmanager
async def client_of(sdk: Any, endpoints: dict[str, str]) -> AsyncIterator[tuple[Any, kvproxy.AsyncTransport]]:
    """Yield a client over these engines, and its transport."""
    transport = kvproxy.AsyncTransport(endpoints=endpoints)
    async with LIBRARIES.get(sdk, httpx).AsyncClient(transport=transport, timeout=30.0) as http:
        yield http, transport


def served(transport: kvproxy.AsyncTransport) -> list[str]:
    """Endpoints that were sent requests, the latest first."""
    return [str(one.outcome.endpoint) for one in transport.proxy.recent.latest()]


@pytest.mark.parametrize("sdk", SDKS, ids=lambda sdk: sdk.__name__)
async def test_answers_and_streams_come_from_where_the_prompt_is(sdk: Any) -> None:
    async with simulated_engines(3) as endpoints, client_of(sdk, endpoints) as (http, transport):
        whole, stream = sdk(http)
        assert await whole()
        assert [piece async for piece in stream()]
        assert await whole()
        assert len(set(served(transport))) == 1


@pytest.mark.parametrize("sdk", SDKS, ids=lambda sdk: sdk.__name__)
async def test_a_stream_that_is_left_early_ends_the_engines_request(sdk: Any) -> None:
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "one"}}], "id": "x", "model": "sim"}

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        if call.path.endswith("/messages"):
            usage = {"input_tokens": 1, "output_tokens": 1}
            message = {"id": "x", "type": "message", "role": "assistant", "content": [], "model": "sim", "usage": usage}
            data = json.dumps({"type": "message_start", "message": message}).encode()
            piece = b"event: message_start\ndata: " + data + b"\n\n"
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        else:
            await event(send, json.dumps({"object": "chat.completion.chunk", "created": 1, **first}).encode())
        await call.gone.wait()

    engine = FakeEngine("a", behave)
    async with Server(engine, drain_s=0.1) as server, client_of(sdk, {"a": server.url}) as (http, _):
        pieces = sdk(http)[1]()
        read = asyncio.Event()

        async def read_on() -> None:
            async for _ in pieces:
                read.set()

        if sdk is ask_pydantic_ai:  # its streams end with the task that reads them
            reading = asyncio.create_task(read_on())
            await asyncio.wait_for(read.wait(), 20)
            reading.cancel()
        else:
            await asyncio.wait_for(anext(pieces), 20)
            await pieces.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(engine.calls[0].gone.wait(), 20)


async def test_a_batch_loop_keeps_prompts_with_one_beginning_together() -> None:
    """As evaluation harnesses send them: many at once, in order of their subjects."""
    subjects = [f"subject {number} " * 200 for number in range(4)]

    async def ask(http: httpx.AsyncClient, prompt: str) -> int:
        body = {"model": "sim", "prompt": prompt, "max_tokens": 1}
        answer = await http.post(f"{URL}/completions", json=body)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with simulated_engines(4) as endpoints, client_of(ask_openai, endpoints) as (http, _):
        for subject in subjects:
            await ask(http, subject)
        cached = await asyncio.gather(*(ask(http, f"{subject} question {n}") for n in range(4) for subject in subjects))
    assert sum(count > 0 for count in cached) >= 12
