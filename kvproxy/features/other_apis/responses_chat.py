"""Chat that vLLM makes of a request to `/v1/responses`, for engines that do not render these themselves. Pure.

As `openai/responses/utils.py` of vLLM 0.32 does it, for a history that is all in the request: histories kept by the
engine (`previous_response_id`, `conversation`), and inputs that a chat cannot express, are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

_NO_RAW = Raw()
_NULL = Raw(b"null")
_HEADER = "x-anthropic-billing-header"
#: Fields that a chat has under the same name.
_KEPT = ("model", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")
#: Fields whose history only the engine has, or that it refuses or renders by other rules.
_ELSEWHERE = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
_UNFINISHED = ("in_progress", "incomplete")
_TEXTS = ("text", "input_text", "output_text")
#: How vLLM shows a tool of free text to a model: a function with one argument.
_CUSTOM_INPUT = "input"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {_CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}


class _Content(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class _Item(msgspec.Struct, gc=False):
    """An input item of any type."""

    type: str = "message"
    role: str | None = None
    status: str | None = None
    content: str | list[_Content] | None = None
    summary: list[_Content] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[_Content] | None = None


class _Tool(msgspec.Struct, gc=False):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Raw = _NULL
    strict: bool | None = None
    defer_loading: bool | None = None
    tools: list[_Tool] = []


class _Reasoning(msgspec.Struct, gc=False):
    effort: str | None = None


class _Body(msgspec.Struct, gc=False):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    reasoning: _Reasoning | None = None
    previous_response_id: Raw = _NO_RAW
    conversation: Raw = _NO_RAW
    prompt: Raw = _NO_RAW
    previous_input_messages: Raw = _NO_RAW
    model: Raw = _NO_RAW
    chat_template_kwargs: Raw = _NO_RAW
    media_io_kwargs: Raw = _NO_RAW
    mm_processor_kwargs: Raw = _NO_RAW


_decode = msgspec.json.Decoder(_Body).decode
_Chat = dict[str, Any]


def chat_of_responses(body: bytes) -> bytes:
    """Return the chat body with the same prompt. Raises ValueError for an invalid or unsupported body."""
    try:
        request = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a request for a response to text") from None
    if any(_given(getattr(request, name)) for name in _ELSEWHERE):
        raise ValueError("only the engine knows its history")
    chat: _Chat = {name: value for name in _KEPT if (value := getattr(request, name)) is not _NO_RAW}
    chat["messages"] = _messages(request)
    tools = [shown for tool in request.tools or () for shown in _shown(tool)]
    if request.tools:
        chat["tools"] = tools
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    return msgspec.json.encode(chat)


def _given(value: Raw) -> bool:
    return value is not _NO_RAW and bytes(value) != b"null"


def _messages(request: _Body) -> list[_Chat]:
    made: list[_Chat] = []
    if request.instructions:
        made.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*made, {"role": "user", "content": request.input}]
    if request.input and request.input[-1].status in _UNFINISHED:
        raise ValueError("the last message is to be continued")
    first = len(made)
    for item in request.input:
        before = made[-1] if len(made) > first and made[-1]["role"] == "assistant" else None
        if not _joined(before, said := _said(item)):
            made.append(said)
    return made


def _joined(before: _Chat | None, said: Mapping[str, Any]) -> bool:
    """Merge an assistant's item into the assistant's message before it, if possible; returns True if so."""
    if before is None or said["role"] != "assistant":
        return False
    if "tool_calls" in said:
        before.setdefault("tool_calls", []).extend(said["tool_calls"])
        return True
    name = "reasoning" if "reasoning" in said else "content"
    if before.get(name) is not None:
        return False
    before[name] = said[name]
    return True


def _said(item: _Item) -> _Chat:
    """Return the message that the item is on its own."""
    if item.type in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "tool_calls": [_call(item)]}
    if item.type in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if item.type == "reasoning":
        return {"role": "assistant", "reasoning": _reasoning(item)}
    if item.type != "message" or item.role is None:
        raise ValueError(f"an input item of type {item.type[:40]!r}")
    if item.role == "assistant":
        return {"role": "assistant", "content": _first_text(item.content)}
    said = _content(item.content)
    if item.role == "system" and isinstance(said, list) and any(part["text"].startswith(_HEADER) for part in said):
        raise ValueError("a header that stays, but that a chat would lose")
    return {"role": item.role, "content": said}


def _call(item: _Item) -> _Chat:
    if item.call_id is None or item.name is None:
        raise ValueError("a call without id or name")
    if item.type == "custom_tool_call":
        arguments = msgspec.json.encode({_CUSTOM_INPUT: item.input or ""}).decode()
        function = {"name": item.name, "arguments": arguments}
    elif item.arguments is None:
        raise ValueError("a call without arguments")
    else:
        function = {"name": _flat(item.namespace, item.name), "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _flat(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _reasoning(item: _Item) -> str:
    if item.encrypted_content:
        raise ValueError("encrypted reasoning")
    given = item.content or item.summary
    if isinstance(given, str):
        raise ValueError("reasoning that is no list")
    return (given[0].text or "") if given else ""


def _first_text(content: str | list[_Content] | None) -> str:
    """Of an assistant's parts the engine takes the first."""
    if isinstance(content, str):
        return content
    if not content or content[0].type not in _TEXTS or content[0].text is None:
        raise ValueError("an answer without text")
    return content[0].text


def _content(content: str | list[_Content] | None) -> str | list[_Chat] | None:
    if not isinstance(content, list):
        return content
    if any(part.type not in _TEXTS or part.text is None for part in content):
        raise ValueError("content that is not of text")
    return [{"type": "text", "text": part.text} for part in content]


def _shown(tool: _Tool, namespace: str | None = None) -> list[_Chat]:
    """Return the functions of a tool as shown to the model; none of a tool that the engine itself runs."""
    if tool.type == "namespace" and namespace is None:
        return [shown for one in tool.tools if one.type == "function" for shown in _shown(one, tool.name)]
    function: _Chat = {"name": _flat(namespace, tool.name), "description": tool.description}
    if tool.type == "custom":
        function["parameters"] = _CUSTOM_PARAMETERS
    elif tool.type == "function":
        function.update(parameters=tool.parameters, strict=tool.strict, defer_loading=tool.defer_loading)
    else:
        return []
    return [{"type": "function", "function": function}]
