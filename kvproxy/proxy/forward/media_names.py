"""Identities that clients choose for their pictures, audio and video: found in content parts, removed or salted. Pure.

vLLM takes a part's `uuid` for the identity of its content, and SGLang `content_hash`, `mm_hashes` and
`mm_content_hashes`; no salt enters such a key. A client that can guess another one's identifier gets the other's
picture from the cache, and one that sends its own picture under that identifier has it shown to the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import methodcaller

import msgspec

from kvproxy.base.json_scan import Edit, Member, Span, Steps, cut_members, find_items, find_members, has_quoted

#: Members by which a client names the content of a medium.
MEDIA_NAMES = frozenset({"uuid", "content_hash", "mm_hashes", "mm_content_hashes"})
#: Roots whose members are all media: SGLang's own API, and vLLM's of rendered prompts.
_ALL_MEDIA = frozenset({"features", "image_data", "video_data", "audio_data"})
#: Members of a body that hold messages, or inputs to embed or score; all others stay as they are.
MEDIA_ROOTS = _ALL_MEDIA | {
    *("messages", "input", "documents", "query", "queries", "items"),
    *("data_1", "data_2", "text_1", "text_2"),
}
_UUID = "uuid"
_ESCAPE = rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])"  # an escape of one of their letters, which no encoder writes
_OR_ESCAPED = rb"[a-z_]{0,15}+" + _ESCAPE
#: Such a name, or an escaped string that may be one. By first letter, since most strings begin with another one.
_named = re.compile(
    rb'"(?:u(?:uid"|%(or)b)|m(?:m_(?:content_)?hashes"|%(or)b)|c(?:ontent_hash"|%(or)b)|%(escape)b)'
    % {b"or": _OR_ESCAPED, b"escape": _ESCAPE}
).search

#: Members of messages that hold content parts, and of objects that are content parts themselves.
_CONTENTS = frozenset({"content", "output"})
_OF_PARTS = frozenset(
    {
        *("image_url", "video_url", "audio_url", "input_audio", "image", "video", "audio", "file"),
        *("image_embeds", "audio_embeds", "image_pil"),
    }
)
#: Arguments of tool calls: a client's own data, which the prompt contains.
_ARGUMENTS = frozenset({"input", "arguments"})
#: No engine searches for media deeper than in a tool's answer.
_MAX_DEPTH = 12
_MAX_ITEMS = 1_000_000
_CONTAINERS = (b"{", b"[")

#: Returns the identity in place of the client's own.
Rename = Callable[[str], str]


_find_inner_object: Callable[[bytes], int] = methodcaller("find", b"{", 1)


#: Returns False for a text that surely has no such member; nearly all have none.
may_name_media = partial(has_quoted, _named)


def may_messages_name_media(messages: Sequence[bytes]) -> bool:
    """Return False for messages of a chat that surely have no such member in a content part: such a part is an object
    within its message."""
    if max(map(_find_inner_object, messages), default=-1) < 0:
        return False
    return any(_find_inner_object(message) >= 0 and may_name_media(message) for message in messages)


def find_media_names(body: bytes, members: Iterable[Member], rename: Rename | None) -> Steps[list[Edit]]:
    """Return the edits that remove all such names within these members of a body. With `rename` a `uuid` is replaced
    and stays in use. Raises Unreadable."""
    edits: list[Edit] = []
    for member in members:
        if member.name in MEDIA_ROOTS:
            edits += yield from _look_into(body, member.value, rename, _MAX_DEPTH, media=member.name in _ALL_MEDIA)
    return sorted(edits)


def _look_into(body: bytes, value: Span, rename: Rename | None, depth: int, *, media: bool) -> Steps[list[Edit]]:
    """Return the edits within a value; `media`: all of it belongs to content parts."""
    edits: list[Edit] = []
    first = body[value.start : value.start + 1]
    if first == b"[" and depth:
        for item in (yield from find_items(body, value, _MAX_ITEMS)):
            if body[item.start : item.start + 1] in _CONTAINERS:
                edits += yield from _look_into(body, item, rename, depth - 1, media=media)
    elif first == b"{" and depth:
        edits += yield from _look_into_object(body, value, rename, depth - 1, media=media)
    return edits


def _look_into_object(body: bytes, value: Span, rename: Rename | None, depth: int, *, media: bool) -> Steps[list[Edit]]:
    members = (yield from find_members(body, _is_wanted_in_media if media else _is_wanted, inside=value)).found
    media = media or any(member.name in _OF_PARTS for member in members)
    edits = []
    cut = []
    for member in members:
        if member.name not in MEDIA_NAMES:
            edits += yield from _look_into(body, member.value, rename, depth, media=True)
        elif not media:
            continue
        elif rename is not None and (own := _text_of(body, member)) is not None:
            edits.append(Edit(*member.value, msgspec.json.encode(rename(own))))
        else:
            cut.append(member)
    return edits + cut_members(cut)


def _is_wanted_in_media(name: str) -> bool:
    return name not in _ARGUMENTS


def _is_wanted(name: str) -> bool:
    return name in _CONTENTS or name in _OF_PARTS or name in MEDIA_NAMES


def _text_of(body: bytes, member: Member) -> str | None:
    """Return the text of a `uuid`; None for anything else."""
    if member.name != _UUID or body[member.value.start : member.value.start + 1] != b'"':
        return None
    try:
        return msgspec.json.decode(body[member.value.start : member.value.end], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
