"""The scale-out routes of a simulated vLLM beside its renderers: token ids in and out, and chats made of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request

from kvproxy.lab.simulator.chat_parser import diff_parts, read_parts
from kvproxy.lab.simulator.generation import Answer, Delta
from kvproxy.lab.simulator.openai_shapes import DONE, count_totals, format_event
from kvproxy.lab.simulator.vllm_errors import VllmError, missing_fields
from kvproxy.lab.simulator.vllm_info import read_scale_out
from kvproxy.lab.simulator.vllm_state import VllmState


def as_generation(state: VllmState, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of `/inference/v1/generate` with its sampling parameters where the other APIs have them."""
    state.check_scale_out()
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict) or not body.get("token_ids"):
        raise missing_fields(body, "token_ids", "sampling_params")
    return {**body, **sampling}


class GenerateShape:
    """`/inference/v1/generate`, with `output_mode: tokens`."""

    def build_body(self, answer: Answer) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        whole = answer.read_choice(0)
        usage = count_totals(answer.count_usage())
        return {**self._head(answer), "model": answer.plan.model, "choices": [self._choice(whole)], "usage": usage}

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Yield an event for each delta."""
        for delta in deltas:
            yield format_event({**self._head(answer), "usage": None, "choices": [self._choice(delta)]})
        if last:
            if (answer.plan.body.get("stream_options") or {}).get("include_usage"):
                usage = count_totals(answer.count_usage())
                yield format_event({**self._head(answer), "usage": usage, "choices": []})
            yield DONE

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        """Yield the error and the end."""
        yield format_event(body)
        yield DONE

    def _head(self, answer: Answer) -> dict[str, Any]:
        return {"request_id": answer.plan.id, "output_mode": "tokens"}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        absent = dict.fromkeys(("stop_reason", "routed_experts", "sampling_mask", "weight_versions", "logprobs"))
        return {
            "index": delta.index,
            "finish_reason": delta.finish_reason,
            "token_ids": delta.token_ids,
            **absent,
        }


async def answer_chat_derender(state: VllmState, request: Request) -> Any:
    """Answer with a chat made of generated ids, or with a chunk of one behind those of its `stream_state`."""
    body = await read_scale_out(state, request)
    if not body.get("chat_request"):
        raise VllmError("chat_request is required when a tool or reasoning parser is configured")
    if body.get("stream"):
        return _derender_chunk(state, body)
    choices = [_make_choice(state, choice, [], []) for choice in body["generate_response"]["choices"]]
    named = [{"index": one["index"], "message": one["delta"], "finish_reason": one["finish_reason"]} for one in choices]
    return {"object": "chat.completion", "choices": named}


def _derender_chunk(state: VllmState, body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("prompt_token_ids") is None:
        raise VllmError("prompt_token_ids is required when a tool or reasoning parser is configured.")
    before = body.get("stream_state") or {}
    ids = before.get("output_token_ids") or []
    lengths = before.get("output_chunk_lens") or []
    if sum(lengths) != len(ids):
        raise VllmError("output_chunk_lens must sum to len(output_token_ids)")
    names = before.get("last_tool_call_ids") or []
    choices = [_make_choice(state, choice, ids, names) for choice in body["generate_chunk"]["choices"]]
    new = [token for choice in body["generate_chunk"]["choices"] for token in choice["token_ids"] or ()]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    after = {
        "output_token_ids": ids + new,
        "output_chunk_lens": lengths + ([len(new)] if new else []),
        "role_sent": True,
        "tools_streamed": before.get("tools_streamed") or bool(calls),
        "last_tool_call_ids": names + [call["id"] for call in calls if "id" in call],
    }
    for choice in choices:
        if choice["finish_reason"] and after["tools_streamed"]:
            choice["finish_reason"] = "tool_calls"
        empty = dict.fromkeys(("role", "content", "reasoning"))
        choice["delta"] = {**empty, "tool_calls": [], **choice["delta"]}
    chunk = {"object": "chat.completion.chunk", "model": state.settings.model, "choices": choices, "usage": None}
    return {"chunk": chunk, "stream_state": after}


def _make_choice(state: VllmState, choice: Mapping[str, Any], ids: list[int], names: list[str]) -> dict[str, Any]:
    before = read_parts(state.tokenizer.decode(ids))
    after = read_parts(state.tokenizer.decode([*ids, *(choice["token_ids"] or ())]))
    delta = diff_parts(before, after, state.make_call_id)
    absent = dict.fromkeys(("logprobs", "stop_reason", "token_ids"))
    return {"index": choice["index"], "delta": delta, "finish_reason": choice.get("finish_reason"), **absent}
