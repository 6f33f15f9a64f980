"""What is kept of a prompt to tell, when its session returns, what changed: digests and sizes by part, never text.

A prompt is its head (tools, system blocks, what else shapes the template) and the messages after it. Digests are
seeded by chance at each start of the process: what one of them stood for cannot be found out afterwards.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_intdigest

from kvproxy.bounded import BoundedMapping
from kvproxy.prefix.tokens.session_hashes import PromptText

#: Beyond these a list is one part, and a text has no more lines.
_MAX_ITEMS = 512
_MAX_LISTED_BYTES = 512 * 1024
_MAX_LINES = 2048
#: Messages at the beginning that may be the system prompt of a chat.
_MAX_LEADING = 4
#: An object of a few numbers and arrays.
_HEAD_BYTES = 400

_SEED = int.from_bytes(os.urandom(8), "little")
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_is_system = re.compile(rb'"role"\s?:\s?"(?:system|developer)"').search
_ROLE_WITHIN = 96
_END_OF_LINE = b"\\n"  # as JSON spells it


class PartKind(StrEnum):
    """Of the parts of a head, in the order in which they are compared."""

    TOOL = "tool"
    SYSTEM = "system block"
    TEMPLATE = "template"


_KIND_OF_FIELD = {b"tools": PartKind.TOOL, b"system": PartKind.SYSTEM, b"instructions": PartKind.SYSTEM}


class HeadParts(NamedTuple):
    """Parts of a head that are kept, of one kind after the other: a digest and a size each, and of system blocks the
    digests of their lines."""

    kinds: tuple[PartKind, ...]
    digests: array[int]
    sizes: array[int]
    lines: tuple[array[int], ...]  # one a part, empty but for system blocks

    @property
    def held_bytes(self) -> int:
        """About."""
        return _HEAD_BYTES + 20 * len(self.kinds) + 8 * sum(map(len, self.lines))


class Head(NamedTuple):
    """What of a head is kept."""

    fields: tuple[HeadParts, ...]
    leading: int  # messages that are a part of it

    def all_parts(self) -> list[HeadPart]:
        """In the order in which they are compared."""
        parts = [
            HeadPart(*each)
            for field in self.fields
            for each in zip(field.kinds, field.digests, field.sizes, field.lines, strict=True)
        ]
        return sorted(parts, key=lambda part: _ORDER[part.kind])

    @property
    def held_bytes(self) -> int:
        """About; what heads have in common counts for each."""
        return sum(field.held_bytes for field in self.fields)


class HeadPart(NamedTuple):
    """A tool, a system block, or a field that shapes the template."""

    kind: PartKind
    digest: int
    size: int
    lines: array[int]


_ORDER = {kind: place for place, kind in enumerate(PartKind)}


def is_system(message: bytes) -> bool:
    """Whether it is the chat's system prompt, by how it begins."""
    return _is_system(message, 0, _ROLE_WITHIN) is not None


def digest_part(text: bytes) -> int:
    """The digest of a part, or of a message."""
    return xxh3_64_intdigest(text, _SEED)


class Heads:
    """Heads by their fields, kept once looked at: tools are the same for all sessions of a client."""

    def __init__(self, *, max_entries: int = 1024, max_bytes: int = 4 * 1024 * 1024) -> None:
        self._known: BoundedMapping[int, HeadParts] = BoundedMapping(
            max_entries, max_bytes=max_bytes, size_of=lambda parts: parts.held_bytes
        )

    @property
    def held_bytes(self) -> int:
        """About."""
        return self._known.held_bytes

    def head_of(self, text: PromptText) -> Head:
        """What is to be kept of the prompt's head."""
        fields = [self._parts(field) for field in fields_of(text.shape)]
        leading = 0
        while leading < min(text.parts, _MAX_LEADING) and is_system(message := text.part_at(leading)):
            fields.append(self._parts(b"system:" + message))
            leading += 1
        return Head(tuple(fields), leading)

    def _parts(self, field: bytes) -> HeadParts:
        key = digest_part(field)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = digest_parts(texts_of(field))
        return known


def fields_of(shape: bytes) -> list[bytes]:
    """`name:value` of each field of a shape."""
    return [field for field in shape.split(b"\0") if field]


def head_texts(text: PromptText, head: Head) -> list[tuple[PartKind, bytes]]:
    """The texts of `head.all_parts()`, in the same order."""
    leading = [b"system:" + text.part_at(index) for index in range(head.leading)]
    found = [each for field in (*fields_of(text.shape), *leading) for each in texts_of(field)]
    return sorted(found, key=lambda each: _ORDER[each[0]])


def texts_of(field: bytes) -> list[tuple[PartKind, bytes]]:
    """The parts of a field: the items of a list of tools or system blocks, else all of it."""
    name, _, value = field.partition(b":")
    kind = _KIND_OF_FIELD.get(name, PartKind.TEMPLATE)
    if kind is PartKind.TEMPLATE:
        return [(kind, field)]
    return [(kind, item) for item in _items(value)]


def digest_parts(parts: Sequence[tuple[PartKind, bytes]]) -> HeadParts:
    """What is to be kept of them."""
    return HeadParts(
        tuple([kind for kind, _ in parts]),
        array("Q", [digest_part(text) for _, text in parts]),
        array("I", [len(text) for _, text in parts]),
        tuple([digest_lines(text) if kind is PartKind.SYSTEM else array("q") for kind, text in parts]),
    )


def lines_of(text: bytes) -> list[bytes]:
    """The lines of a text in JSON; all beyond the most that are told apart are one."""
    return text.split(_END_OF_LINE, _MAX_LINES - 1)


def digest_lines(text: bytes) -> array[int]:
    """A digest of each line: Python's own, which is keyed as well and takes half the time for what is short."""
    return array("q", map(hash, lines_of(text)))


def _items(value: bytes) -> list[bytes]:
    if not value.startswith(b"[") or len(value) > _MAX_LISTED_BYTES:
        return [value]
    try:
        items = _decode_items(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [value]
    return [value] if len(items) > _MAX_ITEMS else [bytes(item) for item in items]
