"""Reasoning and tool calls in the text of an answer, as far as it has come: `<think>` and Hermes' `<tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_THINK = "<think>"
_THOUGHT = "</think>"
_CALL = "<tool_call>"
_CALLED = "</tool_call>"
_named = re.compile(r'"name":\s*"([^"]+)"').search
_argued = re.compile(r'"arguments":\s*').search


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an answer that an engine has sent; of each call its name and the arguments so far."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def read_parts(text: str) -> Parts:
    """Return the parts of a text; an end that may begin a mark is held back."""
    reasoning = ""
    if _THINK.startswith(text):
        return Parts()
    if text.startswith(_THINK):
        reasoning, ended, text = text.removeprefix(_THINK).partition(_THOUGHT)
        if not ended:
            return Parts(_hold_back(reasoning, _THOUGHT))
    content, *calls = text.split(_CALL)
    named = [call for call in map(_read_call, calls) if call is not None]
    return Parts(reasoning, content if calls else _hold_back(content, _CALL), tuple(named))


def diff_parts(before: Parts, after: Parts, make_id: Callable[[], str]) -> dict[str, Any]:
    """Return the delta of a chat between two states of its answer."""
    delta: dict[str, Any] = {}
    if reasoning := after.reasoning[len(before.reasoning) :]:
        delta["reasoning"] = reasoning
    if content := after.content[len(before.content) :]:
        delta["content"] = content
    calls = []
    for index, (name, arguments) in enumerate(after.calls):
        if index >= len(before.calls):
            function = {"name": name, "arguments": arguments}
            calls.append({"id": make_id(), "type": "function", "index": index, "function": function})
        elif more := arguments[len(before.calls[index][1]) :]:
            calls.append({"index": index, "function": {"arguments": more}})
    if calls:
        delta["tool_calls"] = calls
    return delta


def _read_call(text: str) -> tuple[str, str] | None:
    inside, ended, _ = text.partition(_CALLED)
    name = _named(inside)
    if name is None:
        return None
    argued = _argued(inside)
    arguments = "" if argued is None else inside[argued.end() :]
    if ended:
        return name[1], arguments.rstrip().removesuffix("}")
    return name[1], _hold_back(arguments, _CALLED).rstrip("} \n")


def _hold_back(text: str, mark: str) -> str:
    """Return the text without an end that may begin a mark."""
    kept = next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
    return text[: len(text) - kept]
