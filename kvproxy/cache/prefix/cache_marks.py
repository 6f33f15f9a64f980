"""The `cache_control` marks in the JSON of messages, system blocks and tools: cuts them out and nothing else, and reads
how long they ask for a prompt to be kept. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Raw

from kvproxy.base.types import Prompt

MARK = b'"cache_control":'  # with the colon, since a text may be just that name
#: Budget of one search for marks: a few ms at most. Beyond it, bytes count as they were sent.
MAX_OBJECTS = 8192
_MESSAGE_OBJECTS = 16  # cost of a message besides its objects
MAX_BYTES = 512 * 1024
#: Errors of undecodable input.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: TTL of a mark without `ttl`, and with "1h"; there are no others.
DEFAULT_TTL_S = 300.0
LONG_TTL_S = 3600.0
#: Clients move a mark along with their last messages.
_MARKED_PARTS = 4

_NO_RAW = Raw()
_any_mark = re.compile(rb'"cache_control"\s?:\s?\{([^{}]{0,64})\}').finditer
_last_mark = re.compile(rb',\s?"cache_control"\s?:\s?\{[^{}]{0,64}\}(\}\]?)\Z').search
_MOST_OF_A_MARK = 96
#: A mark that is the last member of its object.
_plain_mark = re.compile(rb'"cache_control"\s?:\s?\{[^{}]{0,64}\}(?=\s?\})').match
#: How a mark begins, as all clients write it: a longer text to look for is found sooner.
_BEGINNINGS = (b'"cache_control":{"type":"ephemeral"', b'"cache_control": {"type": "ephemeral"')
_NAME = MARK[:-1]
_UNDERSCORE = ord("_")
_COMPACT = b'{"role":"'  # how most messages begin
#: How a message ends that has a mark there.
END_OF_MARKED = b"}}]}"
#: A message's last mark, in its last part.
_mark_at_end = re.compile(rb',\s?"cache_control"\s?:\s?\{[^{}]{0,64}\}(\}\s?\]\s?\})\Z').search
#: Whether an object is written with spaces behind its colons.
is_spaced = re.compile(rb'\{\s?"[^"\\]{0,64}"\s?:\s').match
_space = re.compile(rb"\s{0,8}").match
_COMMA = ord(",")
_comma = re.compile(rb"\s{0,8},\s{0,8}").match


class _Object(msgspec.Struct, gc=False):
    cache_control: Raw = _NO_RAW


class _Message(msgspec.Struct, gc=False):
    content: list[_Object]


#: The objects of something that may have marks.
Decode = Callable[[bytes], list[_Object]]
_decode_objects: Decode = msgspec.json.Decoder(list[_Object]).decode
_decode_object = msgspec.json.Decoder(_Object).decode
_decode_message = msgspec.json.Decoder(_Message).decode


class Looks:
    """Remaining budget for parsing one request."""

    __slots__ = ("_left", "_left_bytes")

    def __init__(self) -> None:
        self._left = MAX_OBJECTS
        self._left_bytes = MAX_BYTES

    def may_look_into(self, message: bytes) -> bool:
        """Charge for a message; returns False if it exceeds the budget."""
        if len(message) > self._left_bytes:
            return False
        self._left -= _MESSAGE_OBJECTS + message.count(b"{")
        self._left_bytes -= len(message)
        return self._left >= 0


def parts_of_message(message: bytes) -> list[_Object]:
    """Return the parts of its content."""
    return _decode_message(message).content


def block_itself(block: bytes) -> list[_Object]:
    """Return a block of a system prompt."""
    return [_decode_object(block)]


def count_marks(messages: Sequence[bytes]) -> int:
    """Return the marks in them, spelled as the first message is; an unusual one (its `ttl` first) is not found."""
    text = b"\0".join(messages)  # one long text is searched sooner than many
    first = text.find(_UNDERSCORE)  # and a single byte is found in a tenth of the time
    if first < 0:
        return 0
    mark = _BEGINNINGS[not text.startswith(_COMPACT) and is_spaced(text) is not None]
    return text.count(mark, max(0, first - len(mark)))


def without_mark_at_end(message: bytes) -> bytes:
    """Of the Messages API, a message with `END_OF_MARKED` without the mark that its last part ends with, or itself:
    nothing else can end so."""
    start = max(0, len(message) - _MOST_OF_A_MARK)
    mark = _mark_at_end(message, start) if message.find(_NAME, start) >= 0 else None
    return message if mark is None else message[: mark.start()] + mark[1]


def without_tool_marks(field: bytes) -> bytes:
    """Of a shape's field with the tools, without their marks."""
    return without_last_mark(field, lambda tools: _decode_objects(tools[len(b"tools:") :]))


def without_last_mark(data: bytes, decode: Decode) -> bytes:
    """As `without_marks`; one that ends the object, or the last one of a list, is surely a member of that object."""
    if last := _last_mark(data, max(0, len(data) - _MOST_OF_A_MARK)):
        data = data[: last.start()] + last[1]
    if len(data) <= MAX_BYTES and MARK in data and data.count(b"{") <= MAX_OBJECTS:
        return without_marks(data, decode)
    return data


def without_plain_marks(data: bytes, most: int) -> bytes | None:
    """Without any marks, whatever object they are in; None: there are more of them, or one is not the last member."""
    pieces: list[bytes] = []
    done = 0
    while (start := data.find(MARK, done)) >= 0:
        mark = _plain_mark(data, start)
        end = len(data[done:start].rstrip()) + done
        if mark is None or data[end - 1] != _COMMA or len(pieces) == most:
            return None
        pieces.append(data[done : end - 1])
        done = mark.end()
    return b"".join((*pieces, data[done:])) if pieces else data


def without_marks(data: bytes, decode: Decode) -> bytes:
    """Without the `cache_control` of the objects that `decode` finds; unchanged where the name is elsewhere too, since
    what is inside of a tool's input or schema is part of the prompt."""
    try:
        values = [bytes(each.cache_control) for each in decode(data) if each.cache_control is not _NO_RAW]
        if len(values) != data.count(MARK):
            return data
        cut = _cut(data, values)
        if any(each.cache_control is not _NO_RAW for each in decode(cut)):
            return data  # a name was spelled with an escape, and another one was cut in its place
    except UNREADABLE:
        return data
    return cut


def _cut(data: bytes, values: Iterable[bytes]) -> bytes:
    """Without these members, each with the comma and the space beside it."""
    pieces = []
    done = 0
    for value in values:
        start = data.index(MARK, done)
        space = _space(data, start + len(MARK))
        if space is None or not data.startswith(value, space.end()):
            return data
        before = data[done:start].rstrip()
        end = space.end() + len(value)
        if before.endswith(b","):
            pieces.append(before[:-1])
        else:
            pieces.append(data[done:start])
            if comma := _comma(data, end):
                end = comma.end()
        done = end
    return b"".join((*pieces, data[done:]))


def read_ttl_s(prompt: Prompt) -> float | None:
    """Return the longest TTL of the marks; None without marks."""
    looked_at = (prompt.shape, *prompt.parts[-_MARKED_PARTS:])
    marks = [each[1] for text in looked_at if _NAME in text for each in _any_mark(text)]
    if not marks:
        return None
    return LONG_TTL_S if any(b'"1h"' in each for each in marks) else DEFAULT_TTL_S
