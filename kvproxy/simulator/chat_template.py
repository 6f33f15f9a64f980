"""ChatML as Qwen models have it: what a chat request looks like as one text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


class TemplateError(ValueError):
    """The conversation cannot be rendered; the text is the engine's answer to the client."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How to render: what of a request besides its messages shapes the text."""

    tools: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def render_chat(messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
    """The prompt text. Known template arguments: `enable_thinking`, `reasoning_effort`, `documents`."""
    if rendering.continue_final_message and rendering.add_generation_prompt:
        raise TemplateError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if not messages:
        raise TemplateError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = ["" if messages[0].get("role") == "system" else _DEFAULT_SYSTEM, _preamble(rendering)]
    parts += [_message(message) for message in messages]
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
        parts.append(f"# Tools\n{_json(rendering.tools)}")
    if rendering.kwargs.get("documents"):
        parts.append(f"# Documents\n{_json(rendering.kwargs['documents'])}")
    if rendering.kwargs.get("reasoning_effort"):
        parts.append(f"Reasoning: {rendering.kwargs['reasoning_effort']}")
    return "".join(f"<|im_start|>system\n{part}<|im_end|>\n" for part in parts)


def _message(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    return f"<|im_start|>{message.get('role', '')}\n{_content(message)}{_json(calls) if calls else ''}<|im_end|>\n"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise TemplateError("Input should be a valid string or a list of content parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            raise TemplateError("The model is not a multimodal model: only text parts can be used")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
