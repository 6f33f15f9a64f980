"""Identity of a prompt's shape: its system prompt and tools, by the rules of `prompt_identity.py`. Pure."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from kvproxy.base.types import RequestKind
from kvproxy.cache.prefix.cache_marks import (
    UNREADABLE,
    block_itself,
    is_spaced,
    without_last_mark,
    without_plain_marks,
    without_tool_marks,
)

#: Blocks and bytes of a `system` that is looked into: a few ms at most. Beyond it, bytes count as they were sent.
_MAX_BLOCKS = 64
_MAX_SYSTEM_BYTES = 256 * 1024

HEADER = b"x-anthropic-billing-header"
_SYSTEM_BLOCKS = b"system:["
_INSTRUCTIONS = b'instructions:"'
#: Text up to the end of its first line, in JSON. Other escapes than these might spell a line's end differently.
REST_OF_LINE = rb'(?:[^"\\]{1,1024}+|\\["\\/bfrt]){0,64}+'
END_OF_LINE = rb'\\n(?!")'  # and a text follows
TEXT_BLOCK = rb'\{\s?"type"\s?:\s?"text"\s?,\s?"text"\s?:\s?(?="[^"])'  # up to the quote of a text that is not empty
_FURTHER_BLOCKS = (b'"},{"type":"text"', b'"}, {"type": "text"')
_is_text_block = re.compile(TEXT_BLOCK).match
_header_of_text = re.compile(b'"' + HEADER + REST_OF_LINE + END_OF_LINE).match
#: With a mark or without, and another block behind it.
_first_block_is_header = re.compile(
    b'%b"%b%b"' % (TEXT_BLOCK, HEADER, REST_OF_LINE) + rb'(?:,\s?"cache_control"\s?:\s?\{[^{}]{0,64}\})?\s?\},\s?(?=\{)'
).match
_OTHER_ROLES = (b'{"role":"user"', b'{"role": "user"')
_system_role = re.compile(rb'"role"\s?:\s?"(?:system|developer)"').search
_ROLE_WITHIN = 96
_decode_items = msgspec.json.Decoder(list[Raw]).decode


def is_system(message: bytes) -> bool:
    """Return whether a message is the chat's system prompt, by its beginning."""
    return not message.startswith(_OTHER_ROLES) and _system_role(message, 0, _ROLE_WITHIN) is not None


def fields_of(shape: bytes) -> list[bytes]:
    """Return `name:value` of each field of a shape."""
    return [field for field in shape.split(b"\0") if field]


def shape_identity(kind: RequestKind, shape: bytes, *, drops_header: bool = True) -> bytes:
    """Return the same for a prompt's shape."""
    if kind is RequestKind.MESSAGES and shape:
        named = []
        at = 0
        while (end := shape.find(b"\0", at)) >= 0:  # sooner than a split
            field = shape[at:end]
            at = end + 1
            if field.startswith(b"system:"):
                field = _system(field, drops_header=drops_header)
            named.append(without_tool_marks(field) if field.startswith(b"tools:") else field)
        return b"\0".join((*named, shape[at:]))
    if kind is RequestKind.RESPONSES and drops_header:
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
    plain = None if drops_header and b'"' + HEADER in field else without_plain_marks(field, _MAX_BLOCKS)
    if plain is None and (plain := _system_by_block(field, drops_header=drops_header)) is None:
        return field
    text = _is_text_block(plain, begin + 1)
    if text is None or not plain.endswith(b'"}]') or plain.startswith(HEADER, text.end() + 1):
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
    if items and not kept:  # only headers: the last of them counts, since those before it are left out elsewhere too
        return b"system:[%b]" % bytes(items[-1])
    comma = b", " if is_spaced(field, len(b"system:[")) else b","
    return b"system:[%b]" % comma.join([without_last_mark(block, block_itself) for block in kept])


def _is_header(block: bytes) -> bool:
    text = _is_text_block(block)
    return text is not None and block.startswith(HEADER, text.end() + 1)
