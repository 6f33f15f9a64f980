"""From request bodies to token ids, for every API a simulated vLLM speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvproxy.simulator.chat_template import Rendering, TemplateError, render_chat
from kvproxy.simulator.tokenizer import Tokenizer
from kvproxy.simulator.vllm_errors import VllmError, missing_fields, validation_errors

Body = Mapping[str, Any]

#: Ids beyond the built-in vocabulary are accepted, so that prompts of other tokenizers can be used as they are.
_MOST_TOKEN_ID = 2**31


class Prompts:
    """Renders and tokenizes; every complaint is a VllmError."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, body: Body) -> list[int]:
        """`/v1/chat/completions`: reasoning effort and documents go to the template, as in vLLM."""
        kwargs = dict(_mapping(body.get("chat_template_kwargs")))
        for name in ("reasoning_effort", "documents"):
            if body.get(name) is not None:
                kwargs.setdefault(name, body[name])
        if body.get("reasoning_effort") == "none":
            kwargs.setdefault("enable_thinking", False)
        return self._render(body, kwargs)

    def tokenize(self, body: Body) -> list[int]:
        """`/tokenize` in either form; unlike a chat it takes template arguments from chat_template_kwargs only."""
        if isinstance(body.get("messages"), list):
            return self._render(body, _mapping(body.get("chat_template_kwargs")))
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if prompt is None:
            raise missing_fields(body, "prompt", "messages")
        shown = f"<list of {len(prompt)} items>" if isinstance(prompt, list) else str(prompt)
        wrong = {"type": "string_type", "loc": "body.prompt", "msg": "Input should be a valid string", "input": shown}
        absent = {
            "type": "missing",
            "loc": "body.messages",
            "msg": "Field required",
            "input": f"<dict of {len(body)} items>",
        }
        raise validation_errors([wrong, absent])

    def completion(self, body: Body) -> list[list[int]]:
        """`/v1/completions`: a text, ids, or a list of either."""
        prompt = body.get("prompt")
        if prompt is None:
            raise missing_fields(body, "prompt")
        return [self._text_or_ids(one) for one in _as_batch(prompt)]

    def embeddings(self, body: Body) -> list[list[int]]:
        """`/v1/embeddings`: the same forms under another name."""
        if body.get("input") is None:
            raise missing_fields(body, "input")
        return [self._text_or_ids(one) for one in _as_batch(body["input"])]

    def responses(self, body: Body) -> list[int]:
        """`/v1/responses`: a text or a list of items, with instructions as the system message."""
        given = body.get("input")
        if given is None:
            raise missing_fields(body, "input")
        messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages += [item if "role" in item else {"role": "user", "content": json.dumps(item)} for item in items]
        return self._render({**body, "messages": messages}, {})

    def anthropic(self, body: Body) -> list[int]:
        """`/v1/messages`: content blocks of any kind count as the text they carry."""
        if not isinstance(body.get("messages"), list):
            raise missing_fields(body, "messages")
        _check_messages(body["messages"])
        messages = [{"role": "system", "content": _flatten(body["system"])}] if body.get("system") else []
        messages += [{**message, "content": _flatten(message.get("content"))} for message in body["messages"]]
        return self._render({"messages": messages, "tools": body.get("tools")}, {})

    def _render(self, body: Body, kwargs: Mapping[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise missing_fields(body, "messages")
        _check_messages(messages)
        rendering = Rendering(
            tools=body.get("tools") or (),
            kwargs=kwargs,
            add_generation_prompt=bool(body.get("add_generation_prompt", True)),
            continue_final_message=bool(body.get("continue_final_message", False)),
        )
        try:
            return self._tokenizer.encode(render_chat(messages, rendering))
        except TemplateError as error:
            raise VllmError(str(error)) from error

    def _text_or_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if not all(isinstance(token, int) and 0 <= token < _MOST_TOKEN_ID for token in prompt):
            raise VllmError("Token ids must be non-negative integers of the vocabulary")
        return list(prompt)


def _check_messages(messages: Sequence[Any]) -> None:
    """A message that is not an object is the client's mistake, as pydantic tells it."""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            problem = {
                "type": "dict_type",
                "loc": f"body.messages.{index}",
                "msg": "Input should be a valid dictionary",
            }
            raise validation_errors([problem | {"input": str(message)[:100]}])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_batch(prompt: Any) -> list[Any]:
    """One text or one list of ids is a batch of one."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        return prompt
    raise VllmError("Either prompt or prompt_embeds must be provided and non-empty.")


def _flatten(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "".join(block["text"] if block.get("type") == "text" else json.dumps(block) for block in content)
