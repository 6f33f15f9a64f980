"""Replace pictures, audio, video and files in messages by their keys. Pure.

A medium is a string inside a content part: a data URI, a URL, base64, or the id of a file. Its replacement is a
stand-in that begins with a digest of its content and is about as long as the text of as many tokens would be, so that
an index that counts bytes neither overflows nor overlooks it. A message that was cut once is not changed again."""

from __future__ import annotations

import re
import sys
from binascii import Error, a2b_base64
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
from xxhash import xxh3_128_hexdigest

from kvproxy.base.json_scan import (
    Edit,
    Span,
    Steps,
    Unreadable,
    apply_edits,
    find_items,
    find_members,
    has_quoted,
    run_at_once,
)
from kvproxy.base.types import Prompt
from kvproxy.cache.media.pictures import HEAD_BYTES, read_picture
from kvproxy.cache.media.urls import UrlSignatures


class MediumKind(StrEnum):
    """Modality of a medium, as vLLM names it; a metric label."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"


class Medium(msgspec.Struct, frozen=True):
    """One picture, audio, video or file of a prompt, and where its stand-in is in the prompt's canonical bytes."""

    kind: MediumKind
    key: str  # digest of the content, or of the URL
    width: int  # pixels; 0: unknown
    height: int
    start: int
    size: int  # bytes of the stand-in


#: Bytes of text in a stand-in for each token.
BYTES_PER_TOKEN = 4
#: Bytes of a stand-in that distinguish it from all others.
HEAD_OF_STAND_IN = 56
_LEAST_TOKENS = 16
_MOST_TOKENS = 16_384
_UNKNOWN_TOKENS = 1024
_PIXELS_PER_TOKEN = 784  # 28 x 28
#: No text has this byte in practice; one that has loses only a match.
_MARK = b"\x7f"
_stand_ins = re.compile(rb"\x7f(image|audio|video|file):([0-9a-f]{32}):(\d{1,5})x(\d{1,5}):[0-9a-f]*\x7f").finditer

#: Of a prompt that is no longer the messages are searched by the expression alone.
_SHORT_BYTES = 4096
#: What a message with media has in it somewhere; nearly all others have not.
_may_hold_media = re.compile(rb'"(?:image|input_(?:image|audio|file)"|audio_url"|video|file"|document")').search
#: Members of content parts that are media themselves, or objects with the medium in one of `_INNER`.
_OUTER = {
    "image_url": MediumKind.IMAGE,
    "video_url": MediumKind.VIDEO,
    "audio_url": MediumKind.AUDIO,
    "input_audio": MediumKind.AUDIO,
    "image": MediumKind.IMAGE,
    "video": MediumKind.VIDEO,
    "audio": MediumKind.AUDIO,
    "file": MediumKind.FILE,
    "file_data": MediumKind.FILE,
    "file_url": MediumKind.FILE,
    "file_id": MediumKind.FILE,
    "source": MediumKind.FILE,
}
_INNER = ("url", "data", "file_data", "file_id")
#: Types of content parts with media, without `_url` and `input_`; a document is a file.
_KINDS = {
    **{kind.value: kind for kind in MediumKind},
    "document": MediumKind.FILE,
}
#: Members that may hold further content parts.
_NESTED = ("content", "output")
_TYPE = "type"
_WANTED = frozenset((*_OUTER, *_NESTED, _TYPE))
_MAX_ITEMS = 4096
_MAX_DEPTH = 3
_MAX_TYPE_BYTES = 32


def may_hold_media(text: bytes, start: int = 0, end: int = sys.maxsize) -> bool:
    """Return False for a message, or a piece of a text, that surely has no medium; most have none."""
    return has_quoted(_may_hold_media, text, start, end)


def cut_part(part: bytes, signatures: UrlSignatures) -> bytes:
    """Return the message with stand-ins for its media; the message itself if there are none."""
    return run_at_once(cut_in_steps(part, signatures)) if may_hold_media(part) else part


def cut_in_steps(part: bytes, signatures: UrlSignatures | None = None) -> Steps[bytes]:
    """Return the same in steps of about a millisecond. Without `signatures` URLs, which are short, are left in."""
    try:
        edits = yield from _find_media(part, Span(0, len(part)), signatures, _MAX_DEPTH)
        return (yield from apply_edits(part, sorted(edits))) if edits else part
    except Unreadable:
        return part


def cut_prompt(prompt: Prompt, signatures: UrlSignatures) -> tuple[Prompt, tuple[Medium, ...]]:
    """Return the prompt with stand-ins for its media, and these."""
    short = sum(map(len, prompt.parts)) <= _SHORT_BYTES
    if not any(map(_may_hold_media if short else may_hold_media, prompt.parts)):
        return prompt, ()
    parts = tuple([cut_part(part, signatures) for part in prompt.parts])
    return Prompt(prompt.shape, parts, prompt.unread_bytes), tuple(find_stand_ins(parts, len(prompt.shape) + 1))


def find_stand_ins(parts: Sequence[bytes], start: int) -> Iterator[Medium]:
    """Yield the media of these messages, the first of which begins at `start` in the canonical bytes."""
    for part in parts:
        if _MARK in part:
            for found in _stand_ins(part):
                kind, key, width, height = found.groups()
                yield Medium(
                    MediumKind(kind.decode()),
                    key.decode(),
                    int(width),
                    int(height),
                    start + found.start(),
                    found.end() - found.start(),
                )
        start += len(part) + 1


def _find_media(part: bytes, at: Span, signatures: UrlSignatures | None, depth: int) -> Steps[list[Edit]]:
    """Return what replaces the media of an object: a message, or a content part."""
    edits: list[Edit] = []
    if part[at.start : at.start + 1] != b"{":
        return edits
    members = (yield from find_members(part, _WANTED.__contains__, inside=at)).found
    kind = _kind_of_part(part, [member.value for member in members if member.name == _TYPE])
    for member in members:
        first = part[member.value.start : member.value.start + 1]
        if member.name in _NESTED:
            if first == b"[" and depth:
                for item in (yield from find_items(part, member.value, _MAX_ITEMS)):
                    edits += yield from _find_media(part, item, signatures, depth - 1)
        elif kind is None or member.name == _TYPE:
            continue
        elif first == b'"':
            edits.append(_replace(part, member.value, kind, signatures))
        elif first == b"{":
            inner = (yield from find_members(part, _INNER.__contains__, inside=member.value)).found
            edits += [
                _replace(part, one.value, kind, signatures)
                for one in inner
                if part[one.value.start : one.value.start + 1] == b'"'
            ]
    return edits


def _kind_of_part(part: bytes, types: Sequence[Span]) -> MediumKind | None:
    """Return the modality of a content part by its `type`; None: it is of text, or a message."""
    if len(types) != 1 or types[0].end - types[0].start > _MAX_TYPE_BYTES:
        return None
    name = part[types[0].start + 1 : types[0].end - 1].decode("ascii", "replace")
    return _KINDS.get(name.removeprefix("input_").removesuffix("_url"))


def _replace(part: bytes, value: Span, kind: MediumKind, signatures: UrlSignatures | None) -> Edit:
    """Return the edit that puts a stand-in where this string is."""
    start = value.start + 1
    end = value.end - 1
    is_url = part.startswith((b"http://", b"https://"), start)
    if part.startswith(_MARK, start) or (is_url and signatures is None):
        return Edit(start, start)
    content = start
    if part.startswith(b"data:", start):
        content = part.find(b",", start, min(end, start + 256)) + 1 or start
    if is_url and signatures is not None:
        url = part[start:end].decode("utf-8", "replace").replace("\\/", "/")
        key = xxh3_128_hexdigest(signatures.unsigned(url).encode("utf-8", "replace"))
        picture = None
    else:
        key = xxh3_128_hexdigest(memoryview(part)[content:end])
        picture = read_picture(_decoded_head(part, content, end)) if kind is not MediumKind.VIDEO else None
    width, height = (picture.width, picture.height) if picture is not None else (0, 0)
    return Edit(start, end, _stand_in(kind, key, width, height))


def _decoded_head(part: bytes, start: int, end: int) -> bytes:
    """Return the first bytes of a medium in base64; b"" for anything else."""
    head = part[start : min(end, start + HEAD_BYTES)].replace(b"\\/", b"/")
    try:
        return a2b_base64(head[: len(head) // 4 * 4])
    except Error:
        return b""


def _stand_in(kind: MediumKind, key: str, width: int, height: int) -> bytes:
    tokens = width * height // _PIXELS_PER_TOKEN if width else _UNKNOWN_TOKENS
    size = BYTES_PER_TOKEN * min(max(tokens, _LEAST_TOKENS), _MOST_TOKENS)
    head = b"\x7f%b:%b:%dx%d:" % (kind.value.encode(), key.encode(), width, height)
    filler = (key * (size // len(key) + 1))[: max(0, size - len(head) - 1)]
    return head + filler.encode() + _MARK
