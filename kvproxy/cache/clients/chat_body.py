"""Convert the body of a chat request for `/tokenize` and `/render`, without re-serialising its parts, and count its
leading messages of text alone. Pure.

The placeholder of an image differs by engine and is the same for every image, so that tokens are only requested in
front of the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvproxy.base.json_scan import Steps, Unreadable, find_members, replace_model, run_at_once, scan_to_replace_model
from kvproxy.base.types import RequestKind

_Fields = dict[str, msgspec.Raw]

#: Fields of a chat request that `/tokenize` takes under the same name and that shape the prompt.
_TOKENIZE_FIELDS = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
)

_NO_RAW = msgspec.Raw()
_READ_FIELDS = (*_TOKENIZE_FIELDS, "model", "documents", "reasoning_effort")
#: Only the fields read: a dict of all would have as many entries as a client likes.
_Read: Any = msgspec.defstruct("_Read", [(name, msgspec.Raw, _NO_RAW) for name in _READ_FIELDS])
_read = msgspec.json.Decoder(_Read).decode
_kwargs = msgspec.json.Decoder(_Fields).decode
#: Longer template arguments are left to the engine's own defaults.
_MAX_KWARGS_BYTES = 64 * 1024


class _Model(msgspec.Struct):
    model: str = ""


_model = msgspec.json.Decoder(_Model).decode


def tokenize_body(model: str, body: bytes) -> bytes:
    """Return the `/tokenize` request for a chat body (raw JSON); `model` replaces the body's unless empty.

    Chat feeds `reasoning_effort` and `documents` to the template and derives `enable_thinking` from the former;
    `/tokenize` does not, so they are put into `chat_template_kwargs`. Raises ValueError for a body without messages.
    """
    fields = _fields(body)
    if "messages" not in fields:
        raise ValueError("not a chat request: no messages")
    request = {name: fields[name] for name in _TOKENIZE_FIELDS if name in fields}
    kwargs = _template_kwargs(fields)
    if kwargs:
        request["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode(kwargs))
    return _with_model(model, fields, request)


def render_body(model: str, body: bytes) -> bytes:
    """Return the `/render` request for a chat body (raw JSON): the body itself, `model` replaced unless empty."""
    if not model:
        return body
    try:
        replaced = replace_model(body, model, named=_model(body).model)
        return run_at_once(scan_to_replace_model(body, model)) if replaced is None else replaced
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Unreadable):
        raise ValueError("not a JSON object") from None


def _fields(body: bytes) -> _Fields:
    try:
        read = _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a JSON object") from None
    return {name: raw for name in _READ_FIELDS if (raw := getattr(read, name)) is not _NO_RAW}


def _given_kwargs(raw: bytes) -> _Fields:
    try:
        return _kwargs(raw) if len(raw) <= _MAX_KWARGS_BYTES else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a JSON object") from None


def _with_model(model: str, fields: _Fields, request: _Fields) -> bytes:
    named = {"model": msgspec.Raw(msgspec.json.encode(model))} if model else {}
    if not model and "model" in fields:
        named["model"] = fields["model"]
    return msgspec.json.encode({**request, **named})


def _template_kwargs(fields: _Fields) -> _Fields:
    """`chat_template_kwargs` as the chat endpoint would complete them; empty when it would add nothing."""
    added = {name: fields[name] for name in ("documents", "reasoning_effort") if _given(fields.get(name))}
    if not added:
        return {}
    given = fields.get("chat_template_kwargs")
    kwargs = _given_kwargs(bytes(given)) if given is not None and _given(given) else {}
    if "reasoning_effort" in added and "enable_thinking" not in kwargs:
        thinks = bytes(added["reasoning_effort"]).strip() != b'"none"'
        added["enable_thinking"] = msgspec.Raw(b"true" if thinks else b"false")
    return {**kwargs, **added}


def _given(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value).strip() != b"null"


#: Parts of a message, blocks of Anthropic's, and nested ones in lists of either.
_TEXTS = frozenset(
    {
        *("text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning_text"),
        *("tool_use", "tool_result", "tool_reference"),
    }
)
#: Items of the Responses API; a message of the others has no type.
_ITEMS = frozenset(
    {
        *("message", "reasoning", "function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output"),
    }
)


class _Part(msgspec.Struct, gc=False):
    type: str
    content: msgspec.Raw = _NO_RAW


class _Message(msgspec.Struct, gc=False):
    type: str = "message"
    content: msgspec.Raw = _NO_RAW
    output: msgspec.Raw = _NO_RAW


_message = msgspec.json.Decoder(_Message).decode
_parts = msgspec.json.Decoder(list[_Part]).decode


def count_text_parts(parts: Sequence[bytes]) -> int:
    """Messages before the first that has something else in it, or that cannot be read."""
    for index, part in enumerate(parts):
        if part.startswith(b'"'):
            continue
        try:
            message = _message(part)
            if message.type not in _ITEMS:
                return index
            for content in (message.content, message.output):
                if bytes(content).startswith(b"[") and not _is_text(content):
                    return index
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return index
    return len(parts)


def _is_text(content: msgspec.Raw) -> bool:
    """Return True for a list of parts that are text or hold such a list themselves (what a tool answers)."""
    outer = _parts(content)
    inner = [part for one in outer for part in _parts_of(one.content)]
    return all(part.type in _TEXTS for part in (*outer, *inner)) and not any(_parts_of(part.content) for part in inner)


def _parts_of(content: msgspec.Raw) -> list[_Part]:
    return _parts(content) if bytes(content).startswith(b"[") else []


def with_leading_parts(kind: RequestKind, body: bytes, parts: Sequence[bytes]) -> Steps[bytes]:
    """Return the body with these messages instead of all of its own. Raises Unreadable."""
    name = "input" if kind is RequestKind.RESPONSES else "messages"
    found = (yield from find_members(body, lambda member: member == name)).found
    if not found:
        raise Unreadable(f"no {name}")
    span = found[-1].value
    return b"%b[%b]%b" % (body[: span.start], b",".join(parts), body[span.end :])
