"""A prompt's head: tools, system prompt, and other inputs of the template. Only digests and sizes are kept, never text.

Digests are seeded at random at each start of the process, so that their inputs cannot be found out afterwards."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_intdigest

from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.prefix.session_hashes import PromptText
from kvproxy.cache.prefix.shape_identity import is_system

#: Beyond these a list is one part.
_MAX_ITEMS = 512
_MAX_LISTED_BYTES = 512 * 1024
#: Messages at the beginning that may be the system prompt of a chat.
_MAX_LEADING = 4

SEED = int.from_bytes(os.urandom(8), "little")
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_END_OF_LINE = b"\\n"  # as JSON spells it


class PartKind(StrEnum):
    """Of the parts of a head, in the order in which they are compared."""

    SYSTEM = "system block"
    TOOL = "tool"
    TEMPLATE = "template"


# found sooner so
_SYSTEM = PartKind.SYSTEM
_TOOL = PartKind.TOOL
_TEMPLATE = PartKind.TEMPLATE
_KIND_OF_FIELD = {b"tools": PartKind.TOOL, b"system": PartKind.SYSTEM, b"instructions": PartKind.SYSTEM}


class HeadField(msgspec.Struct, frozen=True, gc=False):
    """A field that shapes the prompt, or a message that is a chat's system prompt."""

    kind: PartKind
    digest: int
    size: int  # of its value
    tools: array[int]  # a digest each; empty for other fields


class Head(msgspec.Struct, frozen=True, gc=False):
    """Kept digests of a head."""

    fields: tuple[HeadField, ...]
    leading: int  # messages that are a part of it
    held_bytes: int = 0  # about; tools that heads have in common count for each

    def of_kind(self, kind: PartKind) -> list[HeadField]:
        """Its fields of one kind."""
        return [field for field in self.fields if field.kind is kind]


class HeadText(NamedTuple):
    """A field's text, uncopied, and where it begins in the canonical bytes of its prompt."""

    kind: PartKind
    text: bytes | memoryview
    start: int


def digest_part(text: bytes | memoryview) -> int:
    """Return the digest of a part, or of a message."""
    return xxh3_64_intdigest(text, SEED)


def head_texts(text: PromptText) -> tuple[list[HeadText], int]:
    """Return the texts of a head, and the messages that are a part of it."""
    found = []
    shape = text.shape
    at = 0
    view = memoryview(shape)
    while (end := shape.find(b"\0", at)) >= 0:
        value = shape.find(b":", at, end) + 1
        kind = _KIND_OF_FIELD.get(shape[at : value - 1], PartKind.TEMPLATE)
        start = at if kind is PartKind.TEMPLATE else value
        found.append(HeadText(kind, view[start:end], start))
        at = end + 1
    at = len(shape) + 1
    leading = 0
    while leading < min(text.parts, _MAX_LEADING) and is_system(message := text.part_at(leading)):
        found.append(HeadText(PartKind.SYSTEM, message, at))
        at += len(message) + 1
        leading += 1
    return found, leading


def items_of(value: bytes) -> list[bytes]:
    """Return the items of a list; of what is none, or too long to be looked at, all of it."""
    if not value.startswith(b"[") or len(value) > _MAX_LISTED_BYTES:
        return [value]
    try:
        items = _decode_items(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [value]
    return [value] if len(items) > _MAX_ITEMS else [bytes(item) for item in items]


class Heads:
    """Makes heads; lists of tools are looked into once, since they are the same for all sessions of a client. They are
    in a dict, the oldest first out: a hit in a BoundedMapping takes longer than all else that is done with them."""

    def __init__(self, *, max_bytes: int = 1024 * 1024) -> None:
        self.held_bytes = 0  # about
        self._max_bytes = max_bytes
        self._tools: dict[int, array[int]] = {}

    def head_of(self, text: PromptText) -> Head:
        """Return what is to be kept of the prompt's head."""
        fields = []
        held = 0
        at = 0
        leading = 0
        shape = text.shape
        view = memoryview(shape)
        while (end := shape.find(b"\0", at)) >= 0:
            digest = xxh3_64_intdigest(view[at:end], SEED)
            if shape.startswith(b"tools:", at):
                tools = self._tools_of(view[at + len(b"tools:") : end], digest)
                fields.append(HeadField(_TOOL, digest, end - at - len(b"tools:"), tools))
                held += 8 * len(tools)
            else:
                value = shape.find(b":", at, end) + 1
                kind = _KIND_OF_FIELD.get(shape[at : value - 1], _TEMPLATE)
                fields.append(HeadField(kind, digest, end - (at if kind is _TEMPLATE else value), _NO_TOOLS))
            at = end + 1
        while leading < min(text.parts, _MAX_LEADING) and is_system(message := text.part_at(leading)):
            fields.append(HeadField(_SYSTEM, xxh3_64_intdigest(message, SEED), len(message), _NO_TOOLS))
            leading += 1
        return Head(tuple(fields), leading, held + 120 * len(fields))

    def _tools_of(self, value: memoryview, digest: int) -> array[int]:
        known = self._tools.get(digest)
        if known is None:
            known = self._tools[digest] = array("Q", map(digest_part, items_of(bytes(value))))
            self.held_bytes += _LIST_BYTES + 8 * len(known)
            while self.held_bytes > self._max_bytes:
                self.held_bytes -= _LIST_BYTES + 8 * len(self._tools.pop(next(iter(self._tools))))
        return known


_LIST_BYTES = 250  # of a list of tools, besides the digests
_NO_TOOLS: array[int] = array("Q")


class Line(NamedTuple):
    """A line of a system block, both counted from 1."""

    block: int
    number: int
    text: bytes
    start: int  # in all of it


def lines_of(system: bytes) -> Iterator[Line]:
    """All lines of all blocks of a system prompt."""
    at = 0
    for block, item in enumerate(items_of(system), 1):
        at = system.index(item, at)
        for number, text in enumerate(item.split(_END_OF_LINE), 1):
            yield Line(block, number, text, at)
            at += len(text) + len(_END_OF_LINE)
        at -= len(_END_OF_LINE)


def lines_behind(system: bytes, at: int) -> tuple[list[Line], list[Line]]:
    """Return the lines that a difference may be in which begins at that byte of it, or up to a block of text behind
    it; and all lines after these."""
    near: list[Line] = []
    after: list[Line] = []
    for line in lines_of(system):
        if line.start + len(line.text) + len(_END_OF_LINE) > at:
            (near if line.start < at + TEXT_BLOCK_BYTES else after).append(line)
    return near, after
