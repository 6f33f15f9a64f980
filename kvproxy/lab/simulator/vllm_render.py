"""The render routes of a simulated vLLM: the ids that a request would be run with, where scale-out is enabled."""

from __future__ import annotations

from typing import Any

from kvproxy.lab.simulator.generation import GenerationPlan
from kvproxy.lab.simulator.http_call import HttpCall
from kvproxy.lab.simulator.vllm_errors import SCALE_OUT_DISABLED, VllmError
from kvproxy.lab.simulator.vllm_generate import read_json
from kvproxy.lab.simulator.vllm_state import VllmState


async def answer_chat_render(state: VllmState, call: HttpCall) -> None:
    """Answer with the exact ids of a chat, if scale-out is enabled."""
    body = await _scale_out_body(state, call)
    plan = state.planner.plan(body, [state.prompts.encode_chat(body)], state.make_id())
    await call.reply_json(_rendered(f"chatcmpl-{plan.id}", plan, 0))


async def answer_messages_render(state: VllmState, call: HttpCall) -> None:
    """Answer with the ids of the chat made of a request for messages."""
    body = await _scale_out_body(state, call)
    plan = state.planner.plan(body, [state.prompts.encode_anthropic(body)], state.make_id())
    await call.reply_json(_rendered(f"chatcmpl-{plan.id}", plan, 0))


async def answer_responses_render(state: VllmState, call: HttpCall) -> None:
    """Answer with the ids of a response whose history is all in the request."""
    body = await _scale_out_body(state, call)
    if body.get("previous_response_id") is not None:
        name = "previous_response_id"
        raise VllmError(f"{name} is not supported by the stateless render endpoint.", param=name)
    plan = state.planner.plan(body, [state.prompts.encode_responses(body)], state.make_id())
    await call.reply_json(_rendered(f"resp_{plan.id}", plan, 0))


async def answer_completion_render(state: VllmState, call: HttpCall) -> None:
    """As `answer_chat_render`, one entry a prompt."""
    body = await _scale_out_body(state, call)
    plan = state.planner.plan(body, state.prompts.encode_completion(body), state.make_id())
    await call.reply_json([_rendered(f"cmpl-{plan.id}", plan, number) for number in range(len(plan.prompts))])


async def _scale_out_body(state: VllmState, call: HttpCall) -> dict[str, Any]:
    body = await read_json(call)
    if not state.settings.enable_scale_out:
        raise VllmError(SCALE_OUT_DISABLED, kind="PermissionDeniedError", code=403)
    return body


def _rendered(request_id: str, plan: GenerationPlan, number: int) -> dict[str, Any]:
    body = plan.body
    sampling = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": float(body.get("temperature", 1.0)),
        "top_p": float(body.get("top_p", 1.0)),
        "min_p": 0.0,
        "stop": [],
        "stop_token_ids": [],
        "max_tokens": plan.max_tokens,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
    empty = dict.fromkeys(("token_offsets", "features", "content_parts"))
    reasoning = dict.fromkeys(("reasoning_ended", "reasoning_parser_kwargs", "return_token_ids"))
    return {
        "request_id": request_id,
        "token_ids": plan.prompts[number],
        **empty,
        "sampling_params": sampling,
        "model": plan.model,
        **reasoning,
        "output_mode": "tokens",
        "stream": plan.stream,
        "stream_options": body.get("stream_options"),
        "cache_salt": body.get("cache_salt"),
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
