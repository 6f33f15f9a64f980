"""What of a prompt's bytes names it: the table of what engines leave out or read alike. Pure; nothing goes upstream.

| API | left out or read alike | source: vLLM 0.32 |
|---|---|---|
| Messages | a text block of `system` that starts with Claude Code's billing header | `anthropic/serving.py`, also run |
| Messages | that header as the first line of a string `system` | `renderers/chat_utils.py`, also run |
| Chat | the same in the leading system message, a string or text parts | `renderers/chat_utils.py`, also run |
| Messages | `cache_control` of tools and system blocks | `anthropic/protocol.py` knows none, also run |
| both | `cache_control` of content parts | text parts are taken apart to their text, also run |
| both | a content of one text part is that text, a `system` of one text block that string | both, also run |

All else counts as it was sent: whatever enters a prompt, and what only some engines or templates leave out (ids of
tool calls; `cache_control` of a chat's tools, which templates print). Each rule makes of a message another one that
renders to the same, or bytes that are no JSON and are the same only for messages that do; so equal bytes stay equal
prompts. What a rule cannot make out (odd spelling, an object that has the name twice) is left as it was sent: that
costs a match, never a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Raw

from kvproxy.types import Prompt, RequestKind

#: Objects and bytes of what is looked into for marks, and blocks and bytes of a `system`: a few ms at most. Beyond it,
#: bytes count as they were sent.
_MAX_OBJECTS = 8192
_MAX_MARKED_BYTES = 512 * 1024
_MESSAGE_OBJECTS = 16  # what a message counts for besides those in it
_MAX_BLOCKS = 64
_MAX_SYSTEM_BYTES = 256 * 1024

_NO_RAW = Raw()
_MARK = b'"cache_control":'  # with the colon, since a text may be just that name
_HEADER = b"x-anthropic-billing-header"
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
_begins_with_text = re.compile(b"(" + _MESSAGE % rb"[a-z]{1,16}" + rb")\[\s?" + _TEXT_BLOCK).match
_is_text_block = re.compile(_TEXT_BLOCK).match
_header_of_text = re.compile(b'"' + _HEADER + _REST_OF_LINE + _END_OF_LINE).match
#: In a system message that begins with text: a line of it, or all of the first part of several.
_header_of_message = re.compile(
    b"(%b)%b%b(?:%b|%b)"
    % (_MESSAGE % b"system" + b'"', _HEADER, _REST_OF_LINE, _END_OF_LINE, rb'"\},\s?' + _TEXT_BLOCK + b'"')
).match
_last_mark = re.compile(rb',\s?"cache_control"\s?:\s?\{[^{}]{0,64}\}(\}\]?)\Z').search
_MOST_OF_A_MARK = 96
_space = re.compile(rb"\s{0,8}").match
_comma = re.compile(rb"\s{0,8},\s{0,8}").match


class _Object(msgspec.Struct, gc=False):
    cache_control: Raw = _NO_RAW


class _Message(msgspec.Struct, gc=False):
    content: list[_Object]


_decode_objects: Callable[[bytes], list[_Object]] = msgspec.json.Decoder(list[_Object]).decode
_decode_object = msgspec.json.Decoder(_Object).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


#: The APIs that there are rules for.
RULED = frozenset((RequestKind.CHAT, RequestKind.MESSAGES))


def prompt_identity(kind: RequestKind, prompt: Prompt) -> Prompt:
    """The prompt in the bytes that name it, with as many parts. Equal ones render alike."""
    if kind not in RULED:
        return prompt
    rules = PartRules(kind)
    parts = tuple([rules.apply(index, part) for index, part in enumerate(prompt.parts)])
    return Prompt(shape_identity(kind, prompt.shape), parts, prompt.unread_bytes)


class PartRules:
    """The rules for the messages of one request of an API in `RULED`, and what may still be looked into for marks."""

    __slots__ = ("_kind", "_left", "_left_bytes", "marked")

    def __init__(self, kind: RequestKind) -> None:
        self._kind = kind
        self._left = _MAX_OBJECTS
        self._left_bytes = _MAX_MARKED_BYTES
        self.marked = 0  # messages with a mark, so far

    def apply(self, index: int, part: bytes) -> bytes:
        """The bytes that name the message at that place."""
        if not part.startswith(_HEADS_OF_TEXT):
            if _MARK in part:
                self.marked += 1
                self._left -= _MESSAGE_OBJECTS + part.count(b"{")
                self._left_bytes -= len(part)
                if self._left >= 0 and self._left_bytes >= 0:
                    part = _without_marks(part, _objects_of_message)
            part = _as_text(part)
        if index == 0 and self._kind is RequestKind.CHAT and (header := _header_of_message(part)):
            return header[1] + part[header.end() :]
        return part


def shape_identity(kind: RequestKind, shape: bytes) -> bytes:
    """The same for a prompt's shape."""
    if kind is not RequestKind.MESSAGES or not shape:
        return shape
    return b"\0".join([_field(field) for field in shape.split(b"\0")])


def _as_text(message: bytes) -> bytes:
    """A message that begins and ends with a text part, without what is around these: of one part that is the message
    with its text; of several it is no JSON, so equal to nothing but another spelling of the same."""
    begins = _begins_with_text(message)
    if begins is None or not message.endswith(b'"}]}'):
        return message
    return begins[1] + message[begins.end() : -len(b"}]}")] + b"}"


def _field(field: bytes) -> bytes:
    """One `name:value` of a shape."""
    if field.startswith(b"system:"):
        return b"system:" + _system(field[len(b"system:") :])
    return _without_last_mark(field, _decode_tools) if field.startswith(b"tools:") else field


def _system(value: bytes) -> bytes:
    """Without the billing header and marks; blocks are written one way, and a single text block as its text."""
    if header := _header_of_text(value):
        return b'"' + value[header.end() :]
    if not value.startswith(b"[") or len(value) > _MAX_SYSTEM_BYTES:
        return value
    try:
        items = _decode_items(value)
    except _UNREADABLE:
        return value
    if len(items) > _MAX_BLOCKS:
        return value
    blocks = [_without_last_mark(block, _decode_block) for block in map(bytes, items) if not _is_header(block)]
    if not blocks:
        return value
    if len(blocks) == 1 and (text := _is_text_block(blocks[0])) and blocks[0].endswith(b'"}'):
        return blocks[0][text.end() : -1]
    return b"[" + b",".join(blocks) + b"]"


def _is_header(block: bytes) -> bool:
    text = _is_text_block(block)
    return text is not None and block.startswith(_HEADER, text.end() + 1)


def _objects_of_message(message: bytes) -> list[_Object]:
    return _decode_message(message).content


def _decode_block(block: bytes) -> list[_Object]:
    return [_decode_object(block)]


def _decode_tools(field: bytes) -> list[_Object]:
    return _decode_objects(field[len(b"tools:") :])


def _without_last_mark(data: bytes, decode: Callable[[bytes], list[_Object]]) -> bytes:
    """As `_without_marks`; one that ends the object, or the last one of a list, is surely a member of that object."""
    if last := _last_mark(data, max(0, len(data) - _MOST_OF_A_MARK)):
        data = data[: last.start()] + last[1]
    if len(data) <= _MAX_MARKED_BYTES and _MARK in data and data.count(b"{") <= _MAX_OBJECTS:
        return _without_marks(data, decode)
    return data


def _without_marks(data: bytes, decode: Callable[[bytes], list[_Object]]) -> bytes:
    """Without the `cache_control` of the objects that `decode` finds; unchanged where the name is elsewhere too, since
    what is inside of a tool's input or schema is part of the prompt."""
    try:
        values = [bytes(each.cache_control) for each in decode(data) if each.cache_control is not _NO_RAW]
        if len(values) != data.count(_MARK):
            return data
        cut = _cut(data, values)
        if any(each.cache_control is not _NO_RAW for each in decode(cut)):
            return data  # a name was spelled with an escape, and another one was cut in its place
    except _UNREADABLE:
        return data
    return cut


def _cut(data: bytes, values: Iterable[bytes]) -> bytes:
    """Without these members, each with the comma and the space beside it."""
    pieces, done = [], 0
    for value in values:
        start = data.index(_MARK, done)
        space = _space(data, start + len(_MARK))
        if space is None or not data.startswith(value, space.end()):
            return data
        before, end = data[done:start].rstrip(), space.end() + len(value)
        if before.endswith(b","):
            pieces.append(before[:-1])
        else:
            pieces.append(data[done:start])
            if comma := _comma(data, end):
                end = comma.end()
        done = end
    return b"".join((*pieces, data[done:]))
