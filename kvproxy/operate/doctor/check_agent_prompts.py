"""Are the tokens that are asked for prompts of `/v1/messages` and `/v1/responses` those that the engine computes?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvproxy.base.errors import ClientError, NotSupported, Refused
from kvproxy.base.types import RequestKind
from kvproxy.operate.doctor.check_trial import TRIAL_CALLS
from kvproxy.operate.doctor.engine import SAMPLE_TEXT, EngineFacts
from kvproxy.operate.doctor.report import Finding, check, ok, warning

_TOOL = {"name": "look_up", "description": "Looks a word up"}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_WORD = {"word": "naïve"}
_ASK_RENDER = "start the engine with `--enable-scale-out`, so that it renders such prompts itself"

#: Contents of an agent's second turn. No image: these are left to the engine.
_MESSAGES: dict[str, Any] = {
    "max_tokens": 1,
    "system": [{"type": "text", "text": "You are a doctor. "}, {"type": "text", "text": SAMPLE_TEXT}],
    "tools": [{**_TOOL, "input_schema": _SCHEMA}],
    "messages": [
        {"role": "user", "content": "What does it mean?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I do not know.", "signature": "none"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "call_1", "name": "look_up", "input": _WORD},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "artless"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ],
}
_RESPONSES: dict[str, Any] = {
    "max_output_tokens": 1,
    "store": False,
    "instructions": f"You are a doctor. {SAMPLE_TEXT}",
    "tools": [{"type": "function", **_TOOL, "parameters": _SCHEMA}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What does it mean?"}]},
        {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": '{"word": "naïve"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "artless"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Artless."}]},
        {"role": "user", "content": "And now?"},
    ],
}


class _Counted(msgspec.Struct):
    input_tokens: int


class _Answer(msgspec.Struct):
    usage: _Counted


@check("agent prompts", calls=TRIAL_CALLS + 12)
async def check_agent_prompts(engine: EngineFacts, tokenizer: EngineFacts) -> Sequence[Finding]:
    """Compare a sample of each: messages are counted by the engine, a response is generated, of one token. `tokenizer`
    is the engine that is asked for tokens."""
    if not await engine.needs_tokens():
        return []
    await engine.trials.try_generating()  # anything wrong before that is reported elsewhere
    found = [
        await _compare(engine, tokenizer, RequestKind.MESSAGES, _MESSAGES),
        await _compare(engine, tokenizer, RequestKind.RESPONSES, _RESPONSES),
    ]
    return [one for one in found if one is not None]


async def _compare(
    engine: EngineFacts, tokenizer: EngineFacts, kind: RequestKind, sample: dict[str, Any]
) -> Finding | None:
    """None where the engine does not take the sample, with tools and thoughts or without."""
    model = (await engine.choose_model()).id
    for body in _variants(sample):
        raw = msgspec.json.encode({**body, "model": model})
        try:
            counted = await _count(engine, kind, raw)
        except Refused:
            continue
        try:
            tokens = await tokenizer.vllm.prompt_tokens(kind, model, raw)
        except ValueError:
            continue  # only SGLang's template decides on thoughts
        except NotSupported:
            return None  # it cannot return tokens at all, which is reported elsewhere
        except ClientError as error:
            return warning(engine.where, f"no tokens of a prompt of /v1/{kind}: {error}", _ASK_RENDER)
        rendered = tokenizer.vllm.renders.get(kind) is True
        return judge_agent_prompts(engine.where, kind, counted=counted, tokens=len(tokens), rendered=rendered)
    return None


async def _count(engine: EngineFacts, kind: RequestKind, raw: bytes) -> int:
    api = engine.api
    timeout_s = engine.tools.timeouts.exchange_s
    if kind is RequestKind.MESSAGES:
        return (await api.post("/v1/messages/count_tokens", raw, _Counted, timeout_s=timeout_s)).input_tokens
    return (await api.post("/v1/responses", raw, _Answer, timeout_s=timeout_s)).usage.input_tokens


def _variants(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield sample
    yield {name: value for name, value in sample.items() if name != "tools"}
    if "messages" in sample:
        asked, said, answered = sample["messages"]
        said = {**said, "content": [block for block in said["content"] if block["type"] != "thinking"]}
        yield {**sample, "messages": [asked, said, answered]}


def judge_agent_prompts(where: str, kind: RequestKind, *, counted: int, tokens: int, rendered: bool) -> Finding:
    """Return the verdict on one sample of `counted` tokens."""
    how = "rendered by the engine" if rendered else "as the chat they are"
    if tokens == counted:
        return ok(where, f"prompts of /v1/{kind} are known by their tokens, {how}")
    what = (
        f"a prompt of /v1/{kind} has {counted} tokens, but {tokens} {how}: KV events and lookups do not cover such "
        "prompts, which are matched by the approximate index alone"
    )
    fix = (
        "bring the engine that tokenizes and this one to one version, model and chat template"
        if rendered
        else _ASK_RENDER
    )
    return warning(where, what, fix)
