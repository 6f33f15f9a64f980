"""From request bodies to token ids, for every API a simulated vLLM speaks; chats are rendered as ChatML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvproxy.lab.simulator.as_chat import messages_as_chat, responses_as_chat
from kvproxy.lab.simulator.media import MARK, MediaError, MediaLoader, MediaPrompt, RenderedMedium, place_media
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_errors import VllmError, missing_fields, validation_errors

_BILLING_HEADER = "x-anthropic-billing-header"
_DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
Body = Mapping[str, Any]
#: Ids beyond the built-in vocabulary are accepted, so that prompts of other tokenizers can be used as they are.
_MOST_TOKEN_ID = 2**31


class TemplateError(ValueError):
    """The conversation cannot be rendered; the text is the engine's answer to the client."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How to render: what of a request besides its messages shapes the text."""

    tools: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    drops_header: bool = True  # Claude Code's billing header, from system messages


def render_chat(
    messages: Sequence[Mapping[str, Any]], rendering: Rendering, mark_medium: Callable[[Mapping[str, Any]], str]
) -> str:
    """Return the prompt text, with what `mark_medium` makes of content parts that are no text. Known template
    arguments: `enable_thinking`, `reasoning_effort`, `documents`."""
    if rendering.continue_final_message and rendering.add_generation_prompt:
        raise TemplateError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if not messages:
        raise TemplateError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = ["" if messages[0].get("role") == "system" else _DEFAULT_SYSTEM, _preamble(rendering)]
    parts += [_message(message, mark_medium, drops_header=rendering.drops_header) for message in messages]
    if rendering.continue_final_message:
        parts[-1] = parts[-1].removesuffix("<|im_end|>\n")
    if rendering.add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
        if rendering.kwargs.get("enable_thinking") is False:
            parts.append("<think>\n\n</think>\n\n")
    return "".join(parts)


def _preamble(rendering: Rendering) -> str:
    parts = []
    if rendering.tools:
        parts.append(f"# Tools\n{_json([_shown(tool) for tool in rendering.tools])}")
    if rendering.kwargs.get("documents"):
        parts.append(f"# Documents\n{_json(rendering.kwargs['documents'])}")
    if rendering.kwargs.get("reasoning_effort"):
        parts.append(f"Reasoning: {rendering.kwargs['reasoning_effort']}")
    return "".join(f"<|im_start|>system\n{part}<|im_end|>\n" for part in parts)


def _message(message: Mapping[str, Any], mark_medium: Callable[[Mapping[str, Any]], str], *, drops_header: bool) -> str:
    if drops_header and message.get("role") == "system":
        message = {**message, "content": _without_header_lines(message.get("content"))}
    calls = [_called(call) for call in message.get("tool_calls") or ()]
    content = _content(message, mark_medium)
    return f"<|im_start|>{message.get('role', '')}\n{content}{_json(calls) if calls else ''}<|im_end|>\n"


def _called(call: Any) -> Any:
    """Templates get the arguments of a call as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}}


def _shown(tool: Any) -> Any:
    """Return the parts of a function that templates use; optional ones only if given."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    given = {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {**tool, "function": known | given}


def _content(message: Mapping[str, Any], mark_medium: Callable[[Mapping[str, Any]], str]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise TemplateError("Input should be a valid string or a list of content parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise TemplateError("Input should be a valid dictionary")
        is_text = part.get("type") in ("text", "input_text", "output_text")
        texts.append(str(part.get("text", "")) if is_text else mark_medium(part))
    return "".join(texts)


def _without_header_lines(content: Any) -> Any:
    """vLLM drops Claude Code's billing header where a system message, or a text part of one, begins with it: a line."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(_BILLING_HEADER) else content
    if not isinstance(content, list):
        return content
    return [
        {**part, "text": _without_header_lines(part.get("text"))} if isinstance(part, Mapping) else part
        for part in content
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Prompts:
    """Renders and tokenizes; every error is a VllmError. `model` is the name that media are identified with, None: it
    takes text alone. `wide_media`: placeholders name their medium, as SGLang's do."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        drops_header: bool = True,
        model: str | None = "sim",
        wide_media: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._drops_header = drops_header
        self._loader = None if model is None else MediaLoader(model)
        self._wide_media = wide_media

    def encode_chat(self, body: Body) -> list[int]:
        """`/v1/chat/completions`: reasoning effort and documents go to the template, as in vLLM."""
        kwargs = dict(_mapping(body.get("chat_template_kwargs")))
        for name in ("reasoning_effort", "documents"):
            if body.get(name) is not None:
                kwargs.setdefault(name, body[name])
        if body.get("reasoning_effort") == "none":
            kwargs.setdefault("enable_thinking", False)
        return self._render(body, kwargs)

    def encode_tokenize(self, body: Body) -> list[int]:
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

    def encode_completion(self, body: Body) -> list[list[int]]:
        """`/v1/completions`: a text, ids, or a list of either."""
        prompt = body.get("prompt")
        if prompt is None:
            raise missing_fields(body, "prompt")
        return [self._text_or_ids(one) for one in _as_batch(prompt)]

    def encode_responses(self, body: Body) -> list[int]:
        """`/v1/responses`: a text or a list of items, with instructions as the system message."""
        if body.get("input") is None:
            raise missing_fields(body, "input")
        _check_objects(body["input"], "input")
        return self._encode(responses_as_chat, body)

    def encode_anthropic(self, body: Body) -> list[int]:
        """`/v1/messages`: as the chat that it is."""
        if not isinstance(body.get("messages"), list):
            raise missing_fields(body, "messages")
        _check_objects(body["messages"], "messages")
        return self._encode(messages_as_chat, body)

    def _encode(self, as_chat: Callable[[Body], Body], body: Body) -> list[int]:
        try:
            chat = as_chat(body)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise VllmError(f"Invalid value in the request: {error}") from error
        return self.encode_chat(chat)

    def _render(self, body: Body, kwargs: Mapping[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise missing_fields(body, "messages")
        _check_objects(messages, "messages")
        rendering = Rendering(
            tools=body.get("tools") or (),
            kwargs=kwargs,
            add_generation_prompt=bool(body.get("add_generation_prompt", True)),
            continue_final_message=bool(body.get("continue_final_message", False)),
            drops_header=self._drops_header,
        )
        media: list[RenderedMedium] = []
        try:
            text = render_chat(messages, rendering, lambda part: self._mark_medium(part, media))
        except (TemplateError, MediaError) as error:
            raise VllmError(str(error)) from error
        if not media:
            return self._tokenizer.encode(text)
        return self._place_media(text, media)

    def _mark_medium(self, part: Mapping[str, Any], media: list[RenderedMedium]) -> str:
        medium = None if self._loader is None else self._loader.load(part)
        if medium is None:
            raise TemplateError("The model is not a multimodal model: only text parts can be used")
        media.append(medium)
        return MARK

    def _place_media(self, text: str, media: Sequence[RenderedMedium]) -> MediaPrompt:
        pieces = text.split(MARK)
        if len(pieces) != len(media) + 1:
            raise VllmError("A text has the mark of a medium in it")
        return place_media([self._tokenizer.encode(piece) for piece in pieces], media, wide=self._wide_media)

    def _text_or_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if not all(isinstance(token, int) and 0 <= token < _MOST_TOKEN_ID for token in prompt):
            raise VllmError("Token ids must be non-negative integers of the vocabulary")
        return list(prompt)


def _check_objects(values: Any, name: str) -> None:
    """Raise a client's error, in pydantic's wording, for a message that is not an object."""
    for index, value in enumerate(values if isinstance(values, list) else ()):
        if not isinstance(value, Mapping):
            problem = {
                "type": "dict_type",
                "loc": f"body.{name}.{index}",
                "msg": "Input should be a valid dictionary",
            }
            raise validation_errors([problem | {"input": str(value)[:100]}])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_batch(prompt: Any) -> list[Any]:
    """One text or one list of ids is a batch of one."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        return prompt
    raise VllmError("Either prompt or prompt_embeds must be provided and non-empty.")
