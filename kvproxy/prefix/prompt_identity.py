"""What of a prompt's bytes names it: the table of what engines leave out or read alike. Pure; nothing goes upstream.

| API | left out or read alike | source: vLLM 0.32 |
|---|---|---|
| Messages | a text block of `system` that starts with Claude Code's billing header | `anthropic/serving.py`, also run |
| Messages | that header as the first line of a string `system` | `renderers/chat_utils.py`, also run |
| Chat | the same in the leading system message, a string or text parts | `renderers/chat_utils.py`, also run |
| Responses | the same in `instructions`, which are that message | `responses/utils.py`, also run |
| Messages | `cache_control` of tools and system blocks | `anthropic/protocol.py` knows none, also run |
| both | `cache_control` of content parts | text parts are taken apart to their text, also run |
| both | the order of a message's fields | objects have none, also run |
| both | a content of one text part is that text, a `system` of one text block that string | both, also run |

SGLang (0198d48, PR #21064 was not taken) leaves the header in: where all engines are of that kind it counts.

All else counts as it was sent: whatever enters a prompt, and what only some engines or templates leave out (ids of
tool calls; `cache_control` of a chat's tools, which templates print). Each rule makes of a message another one that
renders to the same, or bytes that are no JSON and are the same only for messages that do; so equal bytes stay equal
prompts. What a rule cannot make out (odd spelling, an object that has the name twice) is left as it was sent: that
costs a match, never a wrong one.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from kvproxy.prefix.cache_marks import (
    MARK,
    MAX_BYTES,
    MAX_OBJECTS,
    UNREADABLE,
    block_itself,
    has_only_texts,
    parts_of_message,
    tools_of_field,
    without_last_mark,
    without_marks,
)
from kvproxy.types import Prompt, RequestKind

_MESSAGE_OBJECTS = 16  # what a message counts for besides those in it
#: Blocks and bytes of a `system` that is looked into: a few ms at most. Beyond it, bytes count as they were sent.
_MAX_BLOCKS = 64
_MAX_SYSTEM_BYTES = 256 * 1024

_HEADER = b"x-anthropic-billing-header"
_SYSTEM_BLOCKS, _INSTRUCTIONS = b"system:[", b'instructions:"'
#: Text up to the end of its first line, in JSON. Other escapes than these might spell a line's end differently.
_REST_OF_LINE = rb'(?:[^"\\]|\\["\\/bfrt]){0,1024}+'
_END_OF_LINE = rb'\\n(?!")'  # and a text follows
_MESSAGE = rb'\{\s?"role"\s?:\s?"%s"\s?,\s?"content"\s?:\s?'
_TEXT_BLOCK = rb'\{\s?"type"\s?:\s?"text"\s?,\s?"text"\s?:\s?(?="[^"])'  # up to the quote of a text that is not empty

#: How a message with a string as its content begins, nearly always; others are looked at more closely.
_HEADS_OF_TEXT = tuple(
    form % role
    for role in (b"user", b"assistant", b"tool", b"system")
    for form in (b'{"role":"%b","content":"', b'{"role": "%b", "content": "')
)
#: Of these, the beginnings of a first message that a header may stand in.
_HEADS_OF_HEADER = tuple(head + _HEADER for head in _HEADS_OF_TEXT)
_begins_with_text = re.compile(b"(" + _MESSAGE % rb"[a-z]{1,16}" + rb")\[\s?" + _TEXT_BLOCK).match
_CALLS = b'"tool_calls"'
_begins_as_usual = re.compile(_MESSAGE % rb"[a-z]{1,16}").match
_begins_with_text_part = re.compile(rb"\[\s?" + _TEXT_BLOCK).match
_is_spaced = re.compile(rb'\{\s?"[^"\\]{0,64}"\s?:\s').match
_is_text_block = re.compile(_TEXT_BLOCK).match
_header_of_text = re.compile(b'"' + _HEADER + _REST_OF_LINE + _END_OF_LINE).match
#: With a mark or without, and another block behind it.
_first_block_is_header = re.compile(
    b'%b"%b%b"' % (_TEXT_BLOCK, _HEADER, _REST_OF_LINE)
    + rb'(?:,\s?"cache_control"\s?:\s?\{[^{}]{0,64}\})?\s?\},\s?(?=\{)'
).match
#: In a system message that begins with text: a line of it, or all of the first part of several.
_header_of_message = re.compile(
    b"(%b)%b%b(?:%b|%b)"
    % (_MESSAGE % b"system" + b'"', _HEADER, _REST_OF_LINE, _END_OF_LINE, rb'"\},\s?' + _TEXT_BLOCK + b'"')
).match

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode


#: The APIs whose messages there are rules for.
RULED = frozenset((RequestKind.CHAT, RequestKind.MESSAGES))


def prompt_identity(kind: RequestKind, prompt: Prompt, *, drops_header: bool = True) -> Prompt:
    """The prompt in the bytes that name it, with as many parts. Equal ones render alike on engines that drop the
    billing header, or that do not."""
    shape, parts = prompt.shape, prompt.parts
    if kind is not RequestKind.CHAT:
        shape = shape_identity(kind, shape, drops_header=drops_header)
    if kind in RULED:
        for part in parts:
            if not part.startswith(_HEADS_OF_TEXT) or part.startswith(_HEADS_OF_HEADER):
                rules = PartRules(kind, drops_header=drops_header)
                parts = tuple([rules.apply(index, part) for index, part in enumerate(parts)])
                break
    unchanged = shape is prompt.shape and parts is prompt.parts
    return prompt if unchanged else Prompt(shape, parts, prompt.unread_bytes)


class PartRules:
    """The rules for the messages of one request of an API in `RULED`, and what may still be looked into for marks."""

    __slots__ = ("_left", "_left_bytes", "_may_begin_with_header", "marked")

    def __init__(self, kind: RequestKind, *, drops_header: bool = True) -> None:
        self._may_begin_with_header = drops_header and kind is RequestKind.CHAT
        self._left = MAX_OBJECTS
        self._left_bytes = MAX_BYTES
        self.marked = 0  # messages with a mark, so far

    def apply(self, index: int, part: bytes) -> bytes:
        """The bytes that name the message at that place."""
        if not part.startswith(_HEADS_OF_TEXT):
            part = _plain_text(part) or self._as_text(part)
        if index == 0 and self._may_begin_with_header and (header := _header_of_message(part)):
            return header[1] + part[header.end() :]
        return part

    def _as_text(self, part: bytes) -> bytes:
        if len(part) <= self._left_bytes and MARK in part:
            self.marked += 1
            if self._may_look_into(part):
                part = without_marks(part, parts_of_message)
        begins = _begins_with_text(part)
        ends_with_content = begins is not None and _CALLS not in part  # within a text its quotes are escaped
        if begins is not None and ends_with_content and part.endswith(b'"}]}'):
            return _as_string(begins, part)
        if not (_begins_as_usual(part) if begins is None else ends_with_content and part.endswith(b"]}")):
            return self._in_usual_order(part)
        return part

    def _may_look_into(self, message: bytes) -> bool:
        """Whether it is short enough for what is left; then it counts."""
        if len(message) > self._left_bytes:
            return False
        self._left -= _MESSAGE_OBJECTS + message.count(b"{")
        self._left_bytes -= len(message)
        return self._left >= 0

    def _in_usual_order(self, message: bytes) -> bytes:
        """Role and content first, then the others by name; a content of text as `apply` has it."""
        try:
            fields = _decode_fields(message) if self._may_look_into(message) else {}
        except UNREADABLE:
            return message
        if "role" not in fields or "content" not in fields:
            return message
        content = bytes(fields["content"])
        begins = _begins_with_text_part(content)
        if begins is not None and content.endswith(b'"}]'):
            fields["content"] = Raw(content[begins.end() : -len(b"}]")])
        colon, comma = (b": ", b", ") if _is_spaced(message) else (b":", b",")
        names = ["role", "content", *sorted(fields.keys() - {"role", "content"})]
        return b"{%b}" % comma.join([msgspec.json.encode(name) + colon + bytes(fields[name]) for name in names])


def _plain_text(part: bytes) -> bytes:
    """The message with its text as a string, if unmarked text parts are all it has; else b"". (To decode it takes half
    as long as to look for what else there may be; a text without quotes needs neither.)"""
    begins = _begins_with_text(part)
    if begins is None or not part.endswith(b'"}]}'):
        return b""
    if part.find(b'"', begins.end() + 1) != len(part) - 4 and not has_only_texts(part):
        return b""
    return _as_string(begins, part)


def _as_string(begins: re.Match[bytes], part: bytes) -> bytes:
    """Of one text part that is the message with its text; of several it is no JSON, so equal to nothing but another
    spelling of the same."""
    return b"".join((begins[1], memoryview(part)[begins.end() : -len(b"}]}")], b"}"))


def shape_identity(kind: RequestKind, shape: bytes, *, drops_header: bool = True) -> bytes:
    """The same for a prompt's shape."""
    if kind is RequestKind.MESSAGES and shape:
        return b"\0".join([_field(field, drops_header=drops_header) for field in shape.split(b"\0")])
    if kind is RequestKind.RESPONSES and drops_header:
        return _without_headers_line(shape)
    return shape


def rough_shape(kind: RequestKind, shape: bytes, *, drops_header: bool = True) -> bytes:
    """A shape without the header that is new with each request, of one that has it where it mostly is; two that are the
    same so are the same to `shape_identity`."""
    if kind is not RequestKind.MESSAGES or not drops_header or len(shape) > _MAX_SYSTEM_BYTES:
        return shape
    at = shape.find(_SYSTEM_BLOCKS)
    header = _first_block_is_header(shape, at + len(_SYSTEM_BLOCKS)) if at >= 0 else None
    return shape if header is None else shape[: header.start()] + shape[header.end() :]


def _without_headers_line(shape: bytes) -> bytes:
    """No string in JSON holds the name of the field with a quote behind it."""
    at = shape.find(_INSTRUCTIONS)
    header = _header_of_text(shape, at + len(_INSTRUCTIONS) - 1) if at >= 0 else None
    return shape if header is None else shape[: header.start() + 1] + shape[header.end() :]


def _field(field: bytes, *, drops_header: bool) -> bytes:
    """One `name:value` of a shape."""
    if field.startswith(b"system:"):
        return b"system:" + _system(field[len(b"system:") :], drops_header=drops_header)
    return without_last_mark(field, tools_of_field) if field.startswith(b"tools:") else field


def _system(value: bytes, *, drops_header: bool) -> bytes:
    """Without the billing header and marks; blocks are written one way, and a single text block as its text."""
    if drops_header and (header := _header_of_text(value)):
        return b'"' + value[header.end() :]
    if not value.startswith(b"[") or len(value) > _MAX_SYSTEM_BYTES:
        return value
    try:
        items = _decode_items(value)
    except UNREADABLE:
        return value
    if len(items) > _MAX_BLOCKS:
        return value
    kept = [block for block in map(bytes, items) if not (drops_header and _is_header(block))]
    if items and not kept:  # nothing but headers: the last of them, since those before it are left out elsewhere too
        return b"[%b]" % bytes(items[-1])
    blocks = [without_last_mark(block, block_itself) for block in kept]
    if not blocks:
        return value
    if len(blocks) == 1 and (text := _is_text_block(blocks[0])) and blocks[0].endswith(b'"}'):
        return blocks[0][text.end() : -1]
    return b"[" + b",".join(blocks) + b"]"


def _is_header(block: bytes) -> bool:
    text = _is_text_block(block)
    return text is not None and block.startswith(_HEADER, text.end() + 1)
