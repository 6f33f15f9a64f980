"""From a request body and a prompt's token ids to what an engine runs, as SGLang reads them, and its errors."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from kvproxy.lab.simulator.as_chat import as_part
from kvproxy.lab.simulator.engine_io import SimRequest
from kvproxy.lab.simulator.generation import GenerationPlan
from kvproxy.lab.simulator.json_app import HttpError
from kvproxy.lab.simulator.sglang_radix_pages import hash_pages
from kvproxy.lab.simulator.sglang_settings import SglangSettings
from kvproxy.lab.simulator.tokenizer import Tokenizer


class SglangError(HttpError):
    """Becomes `{"object": "error", message, type, param, code}`."""

    def __init__(
        self, message: str, *, kind: str = "BadRequestError", param: str | None = None, code: int = 400
    ) -> None:
        super().__init__(code, flat_error(message, kind=kind, param=param, code=code))


def flat_error(message: str, *, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """Return the body; in a stream it is the value of `error`."""
    return {"object": "error", "message": message, "type": kind, "param": param, "code": code}


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of vLLM's shape in SGLang's."""
    error = nested["error"]
    return flat_error(error["message"], kind=error["type"], param=error["param"], code=error["code"])


def input_too_long(tokens: int, limit: int) -> SglangError:
    """400 for a prompt that does not fit the context."""
    return SglangError(f"The input ({tokens} tokens) is longer than the model's context length ({limit} tokens).")


def request_too_long(tokens: int, limit: int) -> SglangError:
    """400 for a prompt and an answer that together do not fit."""
    return SglangError(
        f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
        f"You requested a total of {tokens} tokens."
    )


def queue_full() -> SglangError:
    """503 with `--max-queued-requests`."""
    return SglangError("The request queue is full.", kind="SERVICE_UNAVAILABLE", code=503)


def engine_dead() -> SglangError:
    """500 once the scheduler is gone."""
    return SglangError("Internal server error", kind="InternalServerError", code=500)


#: Of `/v1/messages`, by status.
_MESSAGES_ERRORS = {400: "invalid_request_error", 500: "api_error", 503: "overloaded_error"}


def as_messages_error(error: HttpError) -> HttpError:
    """Return the same in the shape of `/v1/messages`, which reports nothing of what went wrong inside."""
    inside = error.status >= 500
    message = "Internal server error" if inside else error.body["message"]
    kind = _MESSAGES_ERRORS.get(error.status, "api_error") if inside else error.body["type"]
    return HttpError(error.status, {"type": "error", "error": {"type": kind, "message": message}})


RANK_HEADER = "x-data-parallel-rank"
#: In the body; the second is the older name.
_RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")


def read_rank(header: str | None, body: Mapping[str, Any], ranks: int) -> int | None:
    """Return the data-parallel rank that is asked for, the header's before the body's; None: any."""
    rank = next((body[name] for name in _RANK_FIELDS if body.get(name) is not None), None)
    if header is not None:
        try:
            rank = int(header)
        except ValueError:
            text = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{header}'"
            raise SglangError(text, kind="400") from None
    if rank is None or (ranks == 1 and rank == 0):
        return None
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise SglangError("1 validation error: routed_dp_rank: Input should be a valid integer", param="routed_dp_rank")
    if not 0 <= rank < ranks:
        raise SglangError(f"routed_dp_rank={rank} out of range [0, {ranks})", kind="BadRequest")
    return rank


def messages_as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat that `/v1/messages` makes of its body, of text and tools: system blocks are lines, a billing
    header is one as any other, and a user's texts stay in order with the results of tools."""
    if not isinstance(body.get("messages"), list) or not all(isinstance(one, dict) for one in body["messages"]):
        raise SglangError("1 validation error: messages: Input should be a valid list", param="messages")
    system = body.get("system") or []
    if isinstance(system, str):
        system = [{"text": system}] if system.strip() else []
    lines = [block["text"] for block in system if block.get("text")]
    chat = [{"role": "system", "content": "\n".join(lines)}] if lines else []
    for message in body["messages"]:
        chat += _chat_messages(message["role"], message["content"])
    return {"messages": chat, "tools": [_chat_tool(tool) for tool in body.get("tools") or ()]}


def _chat_messages(role: str, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    made: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for block in content:
        if block["type"] == "text":
            said.append({"type": "text", "text": block["text"]})
        elif (part := as_part(block)) is not None:
            said.append(part)
        elif block["type"] == "tool_result":
            made += _said(role, said)
            said = []
            made.append(
                {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block.get("content"))}
            )
    calls = [_chat_call(block) for block in content if block["type"] == "tool_use"]
    if calls:
        last = _said(role, said) or [{"role": role}]
        return [*made, {**last[0], "tool_calls": calls}]
    return made + (_said(role, said) or ([] if role == "user" else [{"role": role, "content": ""}]))


def _said(role: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most one message; a single text is a string."""
    if not parts:
        return []
    return [{"role": role, "content": parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts}]


def _result(content: Any) -> Any:
    if not isinstance(content, list):
        return content or ""
    parts = [part for block in content if (part := as_part(block)) is not None]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts or ""


def _chat_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = {**tool["input_schema"]}
    schema.setdefault("type", "object")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": {**function, "strict": bool(tool.get("strict"))}}


_LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_new_tokens")


class SglangPlanner:
    """Checks a request and decides its answer. Any name of a model is its one model's; the same prompt always gets the
    same words."""

    def __init__(self, settings: SglangSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def plan(self, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], plan_id: str) -> GenerationPlan:
        """Return the engine's requests, one a prompt and choice."""
        choices = body.get("n") or 1
        requests = tuple(
            self._request(body, prompt, f"{plan_id}-{next(self._numbers)}", choice)
            for prompt in prompts
            for choice in range(choices)
        )
        return GenerationPlan(
            id=plan_id,
            model=str(body.get("model") or self._settings.model),
            prompts=tuple(tuple(prompt) for prompt in prompts),
            requests=requests,
            stream=bool(body.get("stream")),
            max_tokens=max(request.output_tokens for request in requests),
            body=body,
        )

    def _request(self, body: Mapping[str, Any], prompt: Sequence[int], request_id: str, choice: int) -> SimRequest:
        output_tokens, reason = self._output_length(body, len(prompt))
        token_ids = (*prompt, *self._answer(prompt, choice, output_tokens))
        settings = self._settings
        salt = body.get("cache_salt")
        hashes = hash_pages(token_ids, settings.page_size, paired=settings.paired, namespace=salt or "")
        return SimRequest(
            id=request_id,
            block_hashes=hashes,
            prompt_tokens=len(prompt),
            output_tokens=output_tokens,
            token_ids=token_ids,
            cache_salt=salt,
            finish_reason=reason,
            priority=self._priority(body),
        )

    def _priority(self, body: Mapping[str, Any]) -> int:
        """Return the scheduler's number, lowest first; SGLang's is highest first by default. Without its flag the field
        has no effect."""
        given = body.get("priority")
        if given is None or not self._settings.enable_priority_scheduling:
            return 0
        if isinstance(given, bool) or not isinstance(given, int):
            raise SglangError("1 validation error: priority: Input should be a valid integer", param="priority")
        return given if self._settings.schedule_low_priority_values_first else -given

    def _answer(self, prompt: Sequence[int], choice: int, count: int) -> list[int]:
        seed = xxhash.xxh3_64_intdigest(repr(tuple(prompt)).encode(), seed=choice)
        return random.Random(seed).choices(self._tokenizer.slice_output_ids, k=count)

    def _output_length(self, body: Mapping[str, Any], prompt_tokens: int) -> tuple[int, str]:
        limit = min(self._settings.context_length, self._settings.max_total_num_tokens)
        if prompt_tokens == 0:
            raise SglangError("Prompt cannot be empty")
        if prompt_tokens >= limit:
            raise input_too_long(prompt_tokens, limit)
        asked = next((body[name] for name in _LENGTH_FIELDS if body.get(name) is not None), None)
        if asked is None:
            return min(self._settings.default_output_tokens, limit - prompt_tokens), "stop"
        if not isinstance(asked, int) or asked < 1:
            raise SglangError(f"max_new_tokens must be at least 1, got {asked}.")
        if prompt_tokens + asked > limit:
            raise request_too_long(prompt_tokens + asked, limit)
        return asked, "length"
