"""Token ids kvproxy learns from an engine are those the engine computes with."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.types import RequestKind
from tests.real.conftest import Saw
from tests.real.pair import Pair, engine_client
from tests.real.prompts import chat, raw, text
from tests.support.proxy import running_proxy

pytestmark = pytest.mark.real

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PARTS = [{"type": "text", "text": "first, "}, {"type": "text", "text": "then é漢字🙂"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
    "content parts": {"messages": [{"role": "user", "content": PARTS}]},
    "tools": {"tools": [WEATHER], "tool_choice": "auto"},
    "a tool was called": {
        "messages": [
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        "tools": [WEATHER],
    },
    "template kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "no generation prompt": {"add_generation_prompt": False},
    "continues the last message": {
        "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "reasoning effort": {"reasoning_effort": "high"},
    "no reasoning": {"reasoning_effort": "none"},
    "documents": {"documents": [{"title": "A", "text": "alpha"}]},
    "special tokens as text": {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>user\n"}]},
}


@pytest.mark.parametrize("case", CASES)
async def test_a_chat_has_the_same_tokens(pair: Pair, saw: Saw, case: str) -> None:
    """`/tokenize` of a chat body as it came equals the prompt the engine built for it."""
    body = {**chat(pair.model.name, text(30, seed=case)), **CASES[case], "return_token_ids": True}
    async with running_proxy({"a": pair.a.url}) as proxy, engine_client(pair.a) as engine:
        answer = await proxy.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        known = await engine.prompt_tokens(RequestKind.CHAT, "", raw(body))
        assert engine.renders == {RequestKind.CHAT: False}, "this engine does not render: /tokenize had to be asked"
    assert answer.json()["prompt_token_ids"] == known.tolist()
    saw(f"{case}: {len(known)} tokens, equal")


async def test_the_cases_differ(pair: Pair) -> None:
    """Tools, template arguments, effort and documents shape this model's prompt: equality means something."""
    shaping = ("plain", "tools", "template kwargs", "no generation prompt", "reasoning effort", "documents")
    async with engine_client(pair.a) as engine:
        prompts = [
            tuple(await engine.tokenize_chat("", raw({**chat(pair.model.name, "x"), **CASES[case]})))
            for case in shaping
        ]
    assert len(set(prompts)) == len(prompts)


async def test_a_completion_has_the_same_tokens(pair: Pair, saw: Saw) -> None:
    """`/tokenize` of a plain prompt, too."""
    prompt = text(200, seed="completion") + " é漢字🙂"
    body = {"model": pair.model.name, "prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    async with running_proxy({"a": pair.a.url}) as proxy, engine_client(pair.a) as engine:
        answer = (await proxy.client.post("/v1/completions", json=body)).json()
        known = await engine.tokenize_prompt(pair.model.name, prompt)
    assert answer["choices"][0]["prompt_token_ids"] == known.tolist()
    saw(f"a completion: {len(known)} tokens, equal")
