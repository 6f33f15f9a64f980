"""Identity of a prompt by its bytes: the table of parts that engines leave out or read alike. Pure; nothing goes
upstream.

| API | left out or read alike | source: vLLM 0.32 |
|---|---|---|
| Messages | a text block of `system` that starts with Claude Code's billing header | `anthropic/serving.py`, also run |
| Messages | that header as the first line of a string `system` | `renderers/chat_utils.py`, also run |
| Chat | the same in the leading system message, a string or text parts | `renderers/chat_utils.py`, also run |
| Responses | the same in `instructions`, which are that message | `responses/utils.py`, also run |
| Messages | `cache_control` of tools and system blocks | `anthropic/protocol.py` has none, also run |
| both | `cache_control` of content parts | text parts are taken apart to their text, also run |
| both | the order of a message's fields | objects have none, also run |
| both | a content of one text part is that text, a `system` of one text block that string | both, also run |

SGLang (0198d48, PR #21064 was not taken) leaves the header in: where all engines are of that kind it counts.

All else counts as it was sent: everything that enters a prompt, and parts that only some engines or templates leave out
(ids of tool calls; `cache_control` of a chat's tools, which templates print). Each rule makes of a message another one
that renders to the same, or bytes that are no JSON and are the same only for messages that do; so equal bytes stay
equal prompts. Input unclear to a rule (odd spelling, an object that has the name twice) is left as it was sent: that
costs a match, never a wrong one. Taken for granted: a last string with quotes in it is the last part's text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from kvproxy.base.types import Prompt, RequestKind
from kvproxy.cache.prefix.cache_marks import (
    END_OF_MARKED,
    UNREADABLE,
    Looks,
    count_marks,
    is_spaced,
    parts_of_message,
    without_mark_at_end,
    without_marks,
)
from kvproxy.cache.prefix.shape_identity import END_OF_LINE, HEADER, REST_OF_LINE, TEXT_BLOCK, shape_identity

_MESSAGE = rb'\{\s?"role"\s?:\s?"%s"\s?,\s?"content"\s?:\s?'

#: Usual beginnings of a message with a string as its content; others are examined more closely.
HEADS_OF_TEXT = tuple(
    form % role
    for role in (b"user", b"assistant", b"tool", b"system")
    for form in (b'{"role":"%b","content":"', b'{"role": "%b", "content": "')
)
#: Of these, the beginnings of a first message that may contain a header.
HEADERS = tuple(head + HEADER for head in HEADS_OF_TEXT)
#: Usual beginnings of a message with text in a list, by two of its bytes: all in front of that text, and the rest where
#: that text is the whole content.
_HEADS_OF_PARTS = {
    head[9:11]: (head[:-1] + (b'[{"type": "text", "text": "' if b" " in head else b'[{"type":"text","text":"'), head)
    for head in HEADS_OF_TEXT
}
_NO_HEAD = b"\0", b""
#: How one begins with a list, and with one that has no text in front.
_HEADS_OF_LISTS = tuple(head[:-1] + b"[" for head in HEADS_OF_TEXT)
_HEADS_OF_CALLS = tuple(
    head[:-1] + (b'[{"type": "tool_' if b" " in head else b'[{"type":"tool_') for head in HEADS_OF_TEXT
)
_begins_with_text = re.compile(b"(" + _MESSAGE % rb"[a-z]{1,16}" + rb")\[\s?" + TEXT_BLOCK).match
_CALLS = b'"tool_calls"'
_TEXTS = (b'"text":', b'"text": ')
_QUOTE, _BACKSLASH = b'"\\'
_begins_as_usual = re.compile(_MESSAGE % rb"[a-z]{1,16}").match
_begins_with_text_part = re.compile(rb"\[\s?" + TEXT_BLOCK).match
#: In a system message that begins with text: a line of it, or all of the first part of several.
_header_of_message = re.compile(
    b"(%b)%b%b(?:%b|%b)"
    % (_MESSAGE % b"system" + b'"', HEADER, REST_OF_LINE, END_OF_LINE, rb'"\},\s?' + TEXT_BLOCK + b'"')
).match

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode

_CHAT = RequestKind.CHAT  # found sooner so
#: The APIs whose messages have rules.
RULED = (_CHAT, RequestKind.MESSAGES)


def prompt_identity(kind: RequestKind, prompt: Prompt, *, drops_header: bool = True) -> Prompt:
    """Return the prompt in the bytes that name it, with as many parts. Equal ones render alike on engines that drop the
    billing header, or that do not."""
    shape = prompt.shape
    parts = prompt.parts
    if kind is not _CHAT:
        shape = shape_identity(kind, shape, drops_header=drops_header)
    if kind in RULED and not are_texts(parts):
        parts = tuple(PartRules(kind, drops_header=drops_header).apply(parts))
    return prompt if shape is prompt.shape and parts is prompt.parts else Prompt(shape, parts, prompt.unread_bytes)


def are_texts(parts: Sequence[bytes], start: int = 0) -> bool:
    """Return True if the messages from `start` on have texts for their contents, as nearly all do, and are named by the
    bytes that were sent."""
    for part in parts[start:] if start else parts:
        if not part.startswith(HEADS_OF_TEXT):
            return False
    return start > 0 or not parts or not parts[0].startswith(HEADERS)


class PartRules:
    """The rules for the messages of one request of an API in `RULED`, and what may still be looked into for marks."""

    __slots__ = ("_chat", "_has_marks", "_heads", "_looks", "_may_begin_with_header", "marked")

    def __init__(self, kind: RequestKind, *, drops_header: bool = True) -> None:
        self._chat = kind is _CHAT
        self._heads = _HEADS_OF_CALLS if self._chat else _HEADS_OF_LISTS
        self._may_begin_with_header = drops_header and self._chat
        self._looks: Looks | None = None  # seldom needed
        self._has_marks = False  # in the middle of messages
        self.marked: list[int] = []  # places of messages with a mark

    def apply(self, messages: Sequence[bytes], first: int = 0) -> list[bytes]:
        """Return the bytes that name these messages of the prompt, the first of which stands at that place."""
        new = list(messages)
        as_text = self._as_text
        self._has_marks = count_marks(new) > (0 if self._chat else self._cut_last_marks(new, first))
        named = [
            part if part.startswith(HEADS_OF_TEXT) else as_text(part, index) for index, part in enumerate(new, first)
        ]
        if first == 0 and self._may_begin_with_header and (header := _header_of_message(named[0])):
            named[0] = header[1] + named[0][header.end() :]
        return named

    def _cut_last_marks(self, messages: list[bytes], first: int) -> int:
        """Cut marks at the end of messages, the usual place, and return their number."""
        found = 0
        for place, message in enumerate(messages):
            if message.endswith(END_OF_MARKED) and (cut := without_mark_at_end(message)) is not message:
                messages[place] = cut
                self.marked.append(first + place)
                found += 1
        return found

    def _as_text(self, part: bytes, index: int) -> bytes:
        if self._has_marks and count_marks((part,)):
            self.marked.append(index)
            if not self._may_look_into(part):
                return part
            part = without_marks(part, parts_of_message)
        head, kept = _HEADS_OF_PARTS.get(part[9:11], _NO_HEAD)
        if part.startswith(head) and part.endswith(b'"}]}'):
            begin = len(head)
            quote = part.rfind(_QUOTE, begin, -len(b'"}]}'))
            # Without other quotes there is no other string; or the last of them is in a text.
            if part[begin] != _QUOTE and (quote < 0 or _ends_with_text(part, quote)):
                return b"".join((kept, memoryview(part)[begin : -len(b"}]}")], b"}"))
        elif part.startswith(_HEADS_OF_CALLS if part.endswith(b'"}]}') else self._heads) and part.endswith(b"]}"):
            return part  # no text alone, and no field behind the list
        return self._as_unusual(part)

    def _may_look_into(self, message: bytes) -> bool:
        if self._looks is None:
            self._looks = Looks()
        return self._looks.may_look_into(message)

    def _as_unusual(self, part: bytes) -> bytes:
        begins = _begins_with_text(part)
        if begins is None:
            return part if _begins_as_usual(part) else self._in_usual_order(part)
        if part.endswith(b'"}]}') and _ends_with_text(part, part.rfind(_QUOTE, 0, -len(b'"}]}'))):
            return _as_string(begins, part)
        ends_with_content = part.endswith(b"]}") and not (self._chat and _CALLS in part)  # quotes in texts are escaped
        return part if ends_with_content else self._in_usual_order(part)

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
        quote = content.rfind(_QUOTE, 0, -len(b'"}]'))
        if begins is not None and content.endswith(b'"}]') and _ends_with_text(content, quote):
            fields["content"] = Raw(content[begins.end() : -len(b"}]")])
        colon, comma = (b": ", b", ") if is_spaced(message) else (b":", b",")
        names = ["role", "content", *sorted(fields.keys() - {"role", "content"})]
        return b"{%b}" % comma.join([msgspec.json.encode(name) + colon + bytes(fields[name]) for name in names])


def _ends_with_text(part: bytes, quote: int) -> bool:
    """Return True if the last string in it is a part's text, by the quote in front of its last one: that is an escaped
    one in the text, or has the name in front of it."""
    return part[quote - 1] == _BACKSLASH or part.endswith(_TEXTS, 0, quote)


def _as_string(begins: re.Match[bytes], part: bytes) -> bytes:
    """Of one text part that is the message with its text; of several it is no JSON, so equal to nothing but another
    spelling of the same."""
    return b"".join((begins[1], memoryview(part)[begins.end() : -len(b"}]}")], b"}"))
