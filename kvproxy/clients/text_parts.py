"""How many leading messages of a prompt are of text alone, and the same request with just these. Pure.

What stands for an image differs by engine and is the same for every image, so that tokens are only asked for in front
of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from kvproxy.json_scan import Steps, Unreadable, find_members
from kvproxy.types import RequestKind

_NO_RAW = Raw()
#: Parts of a message, blocks of Anthropic's, and what a list of either may hold again.
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
    content: Raw = _NO_RAW


class _Message(msgspec.Struct, gc=False):
    type: str = "message"
    content: Raw = _NO_RAW
    output: Raw = _NO_RAW


_message = msgspec.json.Decoder(_Message).decode
_parts = msgspec.json.Decoder(list[_Part]).decode


def count_text_parts(parts: Sequence[bytes]) -> int:
    """Messages before the first that has something else in it, or that cannot be read."""
    for index, part in enumerate(parts):
        if part.startswith(b'"'):
            continue
        try:
            message = _message(part)
            if message.type not in _ITEMS or not all(map(_is_text, (message.content, message.output))):
                return index
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return index
    return len(parts)


def _is_text(content: Raw) -> bool:
    """A string, or a list of parts that are text or hold such a list themselves (what a tool answers)."""
    outer = _parts_of(content)
    inner = [part for one in outer for part in _parts_of(one.content)]
    return all(part.type in _TEXTS for part in (*outer, *inner)) and not any(_parts_of(part.content) for part in inner)


def _parts_of(content: Raw) -> list[_Part]:
    return _parts(content) if bytes(content).startswith(b"[") else []


def with_leading_parts(kind: RequestKind, body: bytes, parts: Sequence[bytes]) -> Steps[bytes]:
    """The body with these messages instead of all of its own. Raises Unreadable."""
    name = "input" if kind is RequestKind.RESPONSES else "messages"
    found = (yield from find_members(body, lambda member: member == name)).found
    if not found:
        raise Unreadable(f"no {name}")
    span = found[-1].value
    return b"%b[%b]%b" % (body[: span.start], b",".join(parts), body[span.end :])
