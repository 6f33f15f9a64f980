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
costs a match, never a wrong one. Taken for granted: a last string with quotes in it is the last part's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from kvproxy.prefix.cache_marks import (
    UNREADABLE,
    Looks,
    block_itself,
    is_marked,
    is_spaced,
    parts_of_message,
    without_last_mark,
    without_mark_at_end,
    without_marks,
    without_plain_marks,
    without_tool_marks,
)
from kvproxy.types import Prompt, RequestKind

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
HEADS_OF_TEXT = tuple(
    form % role
    for role in (b"user", b"assistant", b"tool", b"system")
    for form in (b'{"role":"%b","content":"', b'{"role": "%b", "content": "')
)
#: Of these, the beginnings of a first message that a header may stand in.
HEADERS = tuple(head + _HEADER for head in HEADS_OF_TEXT)
_begins_with_text = re.compile(b"(" + _MESSAGE % rb"[a-z]{1,16}" + rb")\[\s?" + _TEXT_BLOCK).match
_CALLS = b'"tool_calls"'
_TEXTS = (b'"text":', b'"text": ')
_FURTHER_BLOCKS = (b'"},{"type":"text"', b'"}, {"type": "text"')
_begins_as_usual = re.compile(_MESSAGE % rb"[a-z]{1,16}").match
_begins_with_text_part = re.compile(rb"\[\s?" + _TEXT_BLOCK).match
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

_CHAT, _MESSAGES, _RESPONSES = RequestKind.CHAT, RequestKind.MESSAGES, RequestKind.RESPONSES  # found sooner so
#: The APIs whose messages there are rules for.
RULED = (_CHAT, _MESSAGES)


def prompt_identity(kind: RequestKind, prompt: Prompt, *, drops_header: bool = True) -> Prompt:
    """The prompt in the bytes that name it, with as many parts. Equal ones render alike on engines that drop the
    billing header, or that do not."""
    shape, parts = prompt.shape, prompt.parts
    if kind is not _CHAT:
        shape = shape_identity(kind, shape, drops_header=drops_header)
    if kind in RULED and not are_texts(parts):
        rules = PartRules(kind, drops_header=drops_header)
        parts = tuple([rules.apply(index, part) for index, part in enumerate(parts)])
    return prompt if shape is prompt.shape and parts is prompt.parts else Prompt(shape, parts, prompt.unread_bytes)


def are_texts(parts: Sequence[bytes], start: int = 0) -> bool:
    """Whether the messages from `start` on have texts for their contents, as nearly all do, and are named by the bytes
    that were sent."""
    for part in parts[start:] if start else parts:
        if not part.startswith(HEADS_OF_TEXT):
            return False
    return start > 0 or not parts or not parts[0].startswith(HEADERS)


class PartRules:
    """The rules for the messages of one request of an API in `RULED`, and what may still be looked into for marks."""

    __slots__ = ("_chat", "_looks", "_may_begin_with_header", "marked")

    def __init__(self, kind: RequestKind, *, drops_header: bool = True) -> None:
        self._chat = kind is _CHAT
        self._may_begin_with_header = drops_header and self._chat
        self._looks = Looks()
        self.marked = 0  # messages with a mark, so far

    def apply(self, index: int, part: bytes) -> bytes:
        """The bytes that name the message at that place."""
        if not part.startswith(HEADS_OF_TEXT):
            part = self._as_text(part)
        if index == 0 and self._may_begin_with_header and (header := _header_of_message(part)):
            return header[1] + part[header.end() :]
        return part

    def _as_text(self, part: bytes) -> bytes:
        begins = _begins_with_text(part)
        if begins is not None and part.endswith(b'"}]}') and part.rfind(b'"', 0, -4) == begins.end():
            return _as_string(begins, part)  # there are no other quotes, so there is nothing else
        if (cut := part if self._chat else without_mark_at_end(part)) is not part:
            self.marked += 1
        if is_marked(cut):
            self.marked += cut is part
            if not self._looks.may_look_into(cut):
                return part
            cut = without_marks(cut, parts_of_message)
        return self._as_text_without_marks(begins, cut)

    def _as_text_without_marks(self, begins: re.Match[bytes] | None, part: bytes) -> bytes:
        if begins is None:
            return part if _begins_as_usual(part) else self._in_usual_order(part)
        if part.endswith(b'"}]}') and _ends_with_text(part):
            return _as_string(begins, part)
        ends_with_content = part.endswith(b"]}") and not (self._chat and _CALLS in part)  # quotes in texts are escaped
        return part if ends_with_content else self._in_usual_order(part)

    def _in_usual_order(self, message: bytes) -> bytes:
        """Role and content first, then the others by name; a content of text as `apply` has it."""
        try:
            fields = _decode_fields(message) if self._looks.may_look_into(message) else {}
        except UNREADABLE:
            return message
        if "role" not in fields or "content" not in fields:
            return message
        content = bytes(fields["content"])
        begins = _begins_with_text_part(content)
        if begins is not None and content.endswith(b'"}]') and _ends_with_text(content + b"}"):
            fields["content"] = Raw(content[begins.end() : -len(b"}]")])
        colon, comma = (b": ", b", ") if is_spaced(message) else (b":", b",")
        names = ["role", "content", *sorted(fields.keys() - {"role", "content"})]
        return b"{%b}" % comma.join([msgspec.json.encode(name) + colon + bytes(fields[name]) for name in names])


def _ends_with_text(part: bytes) -> bool:
    """Whether the last string in it is a part's text: it has escaped quotes in it, or the name in front of it."""
    quote = part.rfind(b'"', 0, -4)
    return part[quote - 1 : quote] == b"\\" or part.endswith(_TEXTS, 0, quote)


def _as_string(begins: re.Match[bytes], part: bytes) -> bytes:
    """Of one text part that is the message with its text; of several it is no JSON, so equal to nothing but another
    spelling of the same."""
    return b"".join((begins[1], memoryview(part)[begins.end() : -len(b"}]}")], b"}"))


def shape_identity(kind: RequestKind, shape: bytes, *, drops_header: bool = True) -> bytes:
    """The same for a prompt's shape."""
    if kind is _MESSAGES and shape:
        named, at = [], 0
        while (end := shape.find(b"\0", at)) >= 0:  # sooner than a split
            field, at = shape[at:end], end + 1
            if field.startswith(b"system:"):
                field = _system(field, drops_header=drops_header)
            named.append(without_tool_marks(field) if field.startswith(b"tools:") else field)
        return b"\0".join((*named, shape[at:]))
    if kind is _RESPONSES and drops_header:
        return _without_headers_line(shape)
    return shape


def header_span(shape: bytes) -> tuple[int, int]:
    """Where a Messages shape has the header that is new with each request, if it is where it mostly is. Two shapes that
    are the same without it are the same to `shape_identity`."""
    if len(shape) > _MAX_SYSTEM_BYTES or not shape.startswith(_SYSTEM_BLOCKS):
        return 0, 0
    header = _first_block_is_header(shape, len(_SYSTEM_BLOCKS))
    return (0, 0) if header is None else header.span()


def _without_headers_line(shape: bytes) -> bytes:
    """No string in JSON holds the name of the field with a quote behind it."""
    at = shape.find(_INSTRUCTIONS)
    header = _header_of_text(shape, at + len(_INSTRUCTIONS) - 1) if at >= 0 else None
    return shape if header is None else shape[: header.start() + 1] + shape[header.end() :]


def _system(field: bytes, *, drops_header: bool) -> bytes:
    """Without the billing header and marks, and a single text block as its text."""
    begin = len(b"system:")
    if drops_header and (header := _header_of_text(field, begin)):
        return b'system:"' + field[header.end() :]
    if not field.startswith(b"[", begin) or len(field) > _MAX_SYSTEM_BYTES:
        return field
    if drops_header and (header := _first_block_is_header(field, begin + 1)):
        field = b"system:[" + field[header.end() :]
    plain = None if drops_header and b'"' + _HEADER in field else without_plain_marks(field, _MAX_BLOCKS)
    if plain is None and (plain := _system_by_block(field, drops_header=drops_header)) is None:
        return field
    text = _is_text_block(plain, begin + 1)
    if text is None or not plain.endswith(b'"}]') or plain.startswith(_HEADER, text.end() + 1):
        return plain
    return plain if any(block in plain for block in _FURTHER_BLOCKS) else b"system:" + plain[text.end() : -2]


def _system_by_block(field: bytes, *, drops_header: bool) -> bytes | None:
    """Without headers and marks wherever they are; None: it is nothing else, or was not looked into."""
    try:
        items = _decode_items(field[len(b"system:") :])
    except UNREADABLE:
        return None
    if len(items) > _MAX_BLOCKS:
        return None
    kept = [block for block in map(bytes, items) if not (drops_header and _is_header(block))]
    if items and not kept:  # nothing but headers: the last of them, since those before it are left out elsewhere too
        return b"system:[%b]" % bytes(items[-1])
    comma = b", " if is_spaced(field, len(b"system:[")) else b","
    return b"system:[%b]" % comma.join([without_last_mark(block, block_itself) for block in kept])


def _is_header(block: bytes) -> bool:
    text = _is_text_block(block)
    return text is not None and block.startswith(_HEADER, text.end() + 1)
