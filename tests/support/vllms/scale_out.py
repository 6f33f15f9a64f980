"""A simulated vLLM with `--enable-scale-out`: prompts rendered to ids, ids in and out, and chats made of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from kvproxy.lab.simulator.generation import Answer, Delta, GenerationPlan, Planner
from kvproxy.lab.simulator.openai_shapes import DONE, ChatShape, count_totals, format_event
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_errors import VllmError, missing_fields
from kvproxy.lab.simulator.vllm_generate import GenerateRoute, generate, read_json
from kvproxy.lab.simulator.vllm_server import GENERATE, HANDLERS, VllmApp
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.lab.simulator.vllm_state import VllmState
from tests.support.vllms.chat_parser import diff_parts, read_parts

CHAT = "/v1/chat/completions"
#: Of rendered requests, by API.
_ID_PREFIXES = {CHAT: "chatcmpl-", "/v1/completions": "cmpl-", "/v1/responses": "resp_", "/v1/messages": "chatcmpl-"}
#: Of chats with a script: what their answer follows, and what ends it.
_TURN = "<|im_start|>assistant\n"
_END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class ScaleOutSettings(VllmSettings):
    """`script`: the answer to each chat, in which reasoning and tool calls are parsed; `guided_calls`: by a grammar.
    Without `scale_out` it has the script alone."""

    script: str = ""
    guided_calls: bool = False
    scale_out: bool = True


def add_scale_out(settings: VllmSettings, **more: Any) -> ScaleOutSettings:
    """Return the settings with scale-out."""
    return ScaleOutSettings(**{one.name: getattr(settings, one.name) for one in fields(settings)}, **more)


class ScaleOutVllm(VllmApp):
    """Serve it while it is entered."""

    def __init__(self, settings: ScaleOutSettings, **more: Any) -> None:
        if settings.script:
            self.generating = {**GENERATE, CHAT: GenerateRoute(GENERATE[CHAT].prompts, _make_parsed_shape)}
        if settings.scale_out:
            self.handlers = {**HANDLERS, **_routes(self.generating, guided=settings.guided_calls)}
        super().__init__(settings, **more)
        if settings.script:
            self.state.planner = ScriptedPlanner(settings, self.state.tokenizer)


class ScriptedPlanner(Planner):
    """Answers each chat with a script."""

    def __init__(self, settings: ScaleOutSettings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self._turn = tokenizer.encode(_TURN)
        self._encode = tokenizer.encode
        self.set_script(settings.script)

    def set_script(self, text: str) -> None:
        """Answer each chat with this text."""
        self._script = self._encode(f"{text}{_END}")

    def answer(self, prompt: Sequence[int], choice: int, count: int, reason: str) -> tuple[list[int], str]:
        """Return the part of the script that is behind the prompt, if that is a chat which goes on in its words."""
        rest = self._rest_of_script(prompt)
        if not rest:
            return super().answer(prompt, choice, count, reason)
        return rest[:count], reason if count < len(rest) else "stop"

    def _rest_of_script(self, prompt: Sequence[int]) -> list[int]:
        turn = self._turn
        starts = range(len(prompt) - len(turn), -1, -1)
        began = next((at + len(turn) for at in starts if list(prompt[at : at + len(turn)]) == turn), None)
        if began is None or list(prompt[began:]) != self._script[: len(prompt) - began]:
            return []
        return self._script[len(prompt) - began :]


class ParsedChatShape(ChatShape):
    """Chats whose reasoning and tool calls are parsed."""

    def __init__(self, *, decode: Callable[[Sequence[int]], str], make_call_id: Callable[[], str], **more: Any) -> None:
        super().__init__(**more)
        self._decode = decode
        self._make_call_id = make_call_id
        self._calls = False

    def read_delta(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        """Return the parts that the new tokens are of."""
        before, after = (
            read_parts(self._decode(answer.plan.slice_output_ids(delta.index, 0, tokens)).removesuffix(_END))
            for tokens in (delta.generated - len(delta.token_ids), delta.generated)
        )
        choice = super().read_delta(answer, delta)
        choice["delta"] = diff_parts(before, after, self._make_call_id)
        self._calls = self._calls or "tool_calls" in choice["delta"]
        if delta.finish_reason and self._calls:
            choice["finish_reason"] = "tool_calls"
        return choice


def _make_parsed_shape(state: VllmState) -> ParsedChatShape:
    return ParsedChatShape(
        decode=state.tokenizer.decode,
        make_call_id=partial(make_call_id, state),
        details=state.settings.enable_prompt_tokens_details,
        fingerprint=state.fingerprint,
    )


def make_call_id(state: VllmState) -> str:
    """Return the name of a tool call."""
    return f"chatcmpl-tool-{state.make_id()}"


def _routes(generating: Mapping[str, GenerateRoute], *, guided: bool) -> dict[tuple[str, str], Any]:
    """Return the handlers that a server has in addition."""
    renders = {
        ("POST", f"{path}/render"): partial(answer_render, path=path, route=route, guided=guided)
        for path, route in generating.items()
    }
    return {
        **renders,
        ("POST", f"{CHAT}/derender"): answer_chat_derender,
        ("POST", "/inference/v1/generate"): answer_ids,
    }


async def answer_render(state: VllmState, request: Request, *, path: str, route: GenerateRoute, guided: bool) -> Any:
    """Answer with the exact ids of a prompt; of completions, one entry a prompt."""
    body = await read_json(request)
    if body.get("previous_response_id") is not None:
        name = "previous_response_id"
        raise VllmError(f"{name} is not supported by the stateless render endpoint.", param=name)
    plan = state.planner.plan(body, route.prompts(state, body), state.make_id())
    rendered = [_rendered(f"{_ID_PREFIXES[path]}{plan.id}", plan, number) for number in range(len(plan.prompts))]
    if guided and body.get("tools"):
        rendered[0]["sampling_params"]["structured_outputs"] = {"structural_tag": "{}"}
    return rendered if path == "/v1/completions" else rendered[0]


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


async def answer_ids(state: VllmState, request: Request) -> ASGIApp:
    """Answer `/inference/v1/generate`."""
    route = GenerateRoute(lambda state, body: [body["token_ids"]], lambda state: GenerateShape())
    return await generate(state, route, request, as_generation(await read_json(request)))


def as_generation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of `/inference/v1/generate` with its sampling parameters where the other APIs have them."""
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
    body = await read_json(request)
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
    delta = diff_parts(before, after, partial(make_call_id, state))
    absent = dict.fromkeys(("logprobs", "stop_reason", "token_ids"))
    return {"index": choice["index"], "delta": delta, "finish_reason": choice.get("finish_reason"), **absent}
