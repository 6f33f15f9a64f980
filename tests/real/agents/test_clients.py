"""Agents by their own SDKs, through kvproxy to a real vLLM: what it will reuse is predicted, whatever their headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvproxy.base.types import EndpointId
from tests.real.agents.conftest import TEMPLATE
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.kvcache import with_kvcache
from tests.real.pair import warm_up
from tests.real.prompts import text
from tests.support.agents import HEADER, MARK
from tests.support.decision import predicted_at
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

TURNS = 5
_DEBUG = {"x-kvproxy-debug": "1"}
#: Of the prompt that was predicted, that was reused, and that there was, in tokens; and by which source.
Turn = tuple[int, int, int, str]


@pytest.fixture(scope="module", params=["rendered", "tokenized"])
def server(request: pytest.FixtureRequest, saw: Saw) -> Iterator[Vllm]:
    """Yield a vLLM that renders agents' prompts, and one that only has `/tokenize`."""
    needs_memory(gib=4)
    saw(f"starting a vLLM server, prompts are {request.param}")
    further = ["--chat-template", str(TEMPLATE), *(["--enable-scale-out"] if request.param == "rendered" else [])]
    server = Vllm("clients", TINY, core=0, further=further)
    with vllm.running([server]):
        warm_up(server)
        first = {"model": TINY.name, "messages": [{"role": "user", "content": text(60, seed="first")}]}
        httpx.post(f"{server.url}/tokenize", json=first, timeout=120).raise_for_status()  # takes seconds once
        yield server


async def ask_messages(proxy: RunningProxy, seed: str, turn: int) -> Turn:
    """By the anthropic SDK, with a new billing header and marks that move on."""
    said: list[Any] = []
    for number in range(turn + 1):
        said.append({"role": "user", "content": [{"type": "text", "text": text(60, seed=(seed, number))}]})
        if number < turn:
            used = {"type": "tool_use", "id": f"toolu_{number}", "name": "read", "input": {"path": f"{number}.py"}}
            said.append({"role": "assistant", "content": [{"type": "text", "text": "Let me read."}, used]})
            result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": text(80, seed=number)}
            said.append({"role": "user", "content": [result]})
            said.append({"role": "assistant", "content": "It says so."})
    said[-1]["content"][-1].update(MARK)
    system: Any = [
        {"type": "text", "text": HEADER.format(f"{turn * 7919:05x}")},
        {"type": "text", "text": text(400, seed=seed), **MARK},
    ]
    tools: Any = [{"name": "read", "description": "Reads a file", "input_schema": {"type": "object"}, **MARK}]
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none", max_retries=0) as client:
        answer = await client.messages.with_raw_response.create(
            model=TINY.name, max_tokens=4, system=system, tools=tools, messages=said, extra_headers=_DEBUG
        )
        usage = (await answer.parse()).usage
    cached = usage.cache_read_input_tokens or 0
    prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
    predicted, source = predicted_at(answer.headers)
    return predicted, cached, prompt, source


async def ask_responses(proxy: RunningProxy, seed: str, turn: int) -> Turn:
    """By the openai SDK, with all of the history in the request and the header as the first line of instructions."""
    items: list[Any] = []
    for number in range(turn + 1):
        said = [{"type": "input_text", "text": text(60, seed=(seed, number))}]
        items.append({"type": "message", "role": "user", "content": said})
        if number < turn:
            call = {"type": "function_call", "call_id": f"call_{number}", "name": "shell", "arguments": '{"cmd": "ls"}'}
            output = {"type": "function_call_output", "call_id": f"call_{number}", "output": text(80, seed=number)}
            items += [call, output]
            answered = [{"type": "output_text", "text": "It says so.", "annotations": []}]
            items.append(
                {"type": "message", "role": "assistant", "id": f"m{number}", "status": "completed", "content": answered}
            )
    tools: Any = [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}]
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.responses.with_raw_response.create(
            model=TINY.name,
            max_output_tokens=4,
            instructions=HEADER.format(f"{turn * 7919:05x}") + "\n" + text(400, seed=seed),
            tools=tools,
            input=items,
            store=False,
            extra_headers=_DEBUG,
        )
        usage = answer.parse().usage
    assert usage is not None
    predicted, source = predicted_at(answer.headers)
    return predicted, usage.input_tokens_details.cached_tokens, usage.input_tokens, source


@pytest.mark.parametrize("events", [False, True], ids=["text index", "kv events"])
@pytest.mark.parametrize("ask", [ask_messages, ask_responses], ids=["anthropic", "openai"])
async def test_a_billing_header_costs_no_prediction(
    server: Vllm, saw: Saw, ask: Callable[[RunningProxy, str, int], Awaitable[Turn]], events: bool
) -> None:
    """Later turns are predicted to hit as much as they do, all of the turn before: by text in sum, by events each."""
    filters = with_kvcache(kv_events=events, request_timeout="20s")
    async with running_proxy({"a": server.url}, policy="kv_aware", filters=filters) as proxy:
        cache = proxy.proxy.kvcache
        assert cache is not None
        indexes, endpoint = cache.overlap.indexes["default"], EndpointId("a")
        if events:
            await until(lambda: bool(indexes.exact))
        before, later = 0, []
        for turn in range(TURNS):
            rows = indexes.precise.count_rows(endpoint)
            predicted, cached, prompt, source = await ask(proxy, f"{ask.__name__} {events} {server.url}", turn)
            saw(f"turn {turn + 1}: {predicted} predicted by {source or 'nothing'}, {cached} reused of {prompt}")
            if turn:
                assert source == ("precise" if events else "approximate")
                assert cached >= before // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS  # the generation prompt may part
                assert not events or predicted == pytest.approx(cached, rel=0.05)
                later.append((predicted, cached))
            before = prompt
            await cache.actions.jobs.settled()
            if events:
                rows += (prompt - cached) // BLOCK_TOKENS
                await until(lambda: indexes.precise.count_rows(endpoint) >= rows)  # noqa: B023
        predicted, cached = map(sum, zip(*later, strict=True))
        assert predicted == pytest.approx(cached, rel=0.05)
