"""Hashes only the new tail of a chat whose earlier turn was hashed before."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import Prompt, RequestKind
from kvproxy.cache.media.cut import Medium, cut_part, find_stand_ins
from kvproxy.cache.media.urls import UrlSignatures
from kvproxy.cache.prefix.hashing import (
    TEXT_BLOCK_BYTES,
    canonical_bytes,
    canonical_tail,
    text_blocks,
    text_chain,
)
from kvproxy.cache.prefix.prompt_identity import HEADERS, HEADS_OF_TEXT, PartRules, are_texts
from kvproxy.cache.prefix.shape_identity import header_span, shape_identity

_MAX_NAMED_BYTES = 16 * 1024 * 1024
_ENTRY_BYTES = 250  # an entry's objects besides the hashes themselves
_MEDIUM_BYTES = 250
#: Marked messages of one prompt before each of which the chat is kept as it began: the API takes four marks.
_MARKS = 4
_MAX_SHAPES = 4096
_SHAPE_BYTES = 300
#: Text whose blocks are remembered together: naming it takes one call, hashing its blocks one each.
_PIECE_BLOCKS = 64
_PIECE_BYTES = _PIECE_BLOCKS * TEXT_BLOCK_BYTES
_MAX_PIECES = 8192
_PIECE_ENTRY_BYTES = 700
_CHAT = RequestKind.CHAT  # found sooner so
_STRING = b'system:"'
_HEADER = _STRING + b"x-anthropic-billing-header"


#: Messages that came before: the API, whether its engines drop the header, their keys, the number of bytes that name
#: them, and their media.
_Named: TypeAlias = "tuple[RequestKind, bool, array[int], int, tuple[Medium, ...]]"


class PromptText(msgspec.Struct):
    """The bytes that name a prompt, by message."""

    made_shape: bytes | Callable[[], bytes]
    part_at: Callable[[int], bytes]
    parts: int
    size: int  # of `canonical_bytes`
    whole: Sequence[bytes] | None = None  # all of them, where they are at hand
    media: tuple[Medium, ...] = ()  # in their order

    @classmethod
    def of_prompt(cls, prompt: Prompt) -> PromptText:
        """Of one that is named by its own bytes."""
        shape = prompt.shape
        parts = prompt.parts
        return cls(shape, parts.__getitem__, len(parts), sum(map(len, parts), len(shape) + 1 + len(parts)), parts)

    @property
    def shape(self) -> bytes:
        """Shape, made on demand: a chat's next turn seldom needs it."""
        if not isinstance(self.made_shape, bytes):
            self.made_shape = self.made_shape()
        return self.made_shape


class SessionHashes:
    """Text blocks by message prefix, bounded by bytes, the longest unused first out. Holds no prompt text.

    A key names all the text it stands for (seed, shape and messages), so what is found under it needs no comparing.
    The entries are a dict in order of use: every request comes by, and a BoundedMapping takes a third longer (4.1 us
    against 3.1 for a chat's next turn, 35 calls against 26).
    """

    def __init__(self, *, max_bytes: int = 64 * 1024 * 1024) -> None:
        self.signatures = UrlSignatures()  # of URLs of media
        self._max_bytes = max_bytes
        self._known: dict[int, array[int]] = {}
        self._named: dict[int, _Named] = {}  # by the messages as they were sent
        self._named_bytes = 0
        self._shapes: BoundedMapping[int, tuple[int, int]] = BoundedMapping(_MAX_SHAPES)
        self._pieces: dict[int, array[int]] = {}  # of text, by its digest behind the block before it
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def held_bytes(self) -> int:
        """Bytes held, objects included."""
        pieces_bytes = _PIECE_ENTRY_BYTES * len(self._pieces)
        return self._bytes + self._named_bytes + pieces_bytes + _SHAPE_BYTES * len(self._shapes)

    def identified(
        self, kind: RequestKind, prompt: Prompt, seed: int, *, drops_header: bool = True
    ) -> tuple[array[int], Sequence[int], int, PromptText | None]:
        """Return the text blocks, the message keys and the bytes of the prompt's identity, and its text, for a kind
        whose messages have rules. Only messages that did not come in the same bytes before are looked at."""
        raw = prompt.parts
        shape = prompt.shape
        text = PromptText(shape, raw.__getitem__, len(raw), len(shape) + 1)
        if kind is _CHAT or not shape or _is_string(shape):
            key = xxh3_64_intdigest(shape, seed)
        else:
            key = self._find_shape(kind, shape, text, seed, drops_header=drops_header)
        if not raw:
            return text_blocks(Prompt(text.shape, ()), seed), (), text.size - 1, None
        begun = key
        sent = [key := xxh3_64_intdigest(part, key) for part in raw]
        if (hashes := self._find_plain(text, raw, seed, sent)) is not None:
            return hashes, sent, text.size - 1 - len(raw) + prompt.unread_bytes, text
        known, count = self._find_named(sent, kind, drops_header)
        keys, size, media = (array("Q"), text.size, ()) if known is None else (known[2][:], *known[3:])
        rules = PartRules(kind, drops_header=drops_header)
        signatures = self.signatures
        new: list[bytes] = []
        if count < len(raw):
            key = keys[-1] if keys else begun
            new = rules.apply([cut_part(part, signatures) for part in raw[count:]], count)
            keys.extend([key := xxh3_64_intdigest(part, key) for part in new])
            for index in sorted(rules.marked)[-_MARKS:]:  # how the chat begins when the mark has moved on
                if index > count:
                    before = sum(map(len, new[: index - count]), size + index - count)
                    begun_media = (*media, *find_stand_ins(new[: index - count], size))
                    self._name(sent[index - 1], (kind, drops_header, keys[:index], before, begun_media))
            media = (*media, *find_stand_ins(new, size))
            size = sum(map(len, new), size + len(new))
            self._name(sent[-1], (kind, drops_header, keys, size, media))

        def part_at(index: int) -> bytes:
            return new[index - count] if index >= count else rules.apply((cut_part(raw[index], signatures),), index)[0]

        prompt_bytes = size - 1 - len(raw) + prompt.unread_bytes  # without the end mark of the parts
        text.part_at = part_at
        text.size = size
        text.whole = None if count else new
        text.media = media
        return self.blocks_of(text, seed, keys), keys, prompt_bytes, text

    def _find_shape(self, kind: RequestKind, shape: bytes, text: PromptText, seed: int, *, drops_header: bool) -> int:
        """Return the key of a shape's identity, looked up by the shape without the header that is new with each
        request."""
        text.made_shape = partial(shape_identity, kind, shape, drops_header=drops_header)
        begin, end = header_span(shape) if drops_header else (0, 0)
        rough = xxh3_64_intdigest(shape[:begin], seed ^ drops_header) if end else seed ^ drops_header
        rough = xxh3_64_intdigest(memoryview(shape)[end:] if end else shape, rough)
        found = self._shapes.get(rough)
        if found is None:
            found = self._shapes[rough] = xxh3_64_intdigest(text.shape, seed), len(text.shape) + 1
        key, text.size = found
        return key

    def _find_plain(
        self, text: PromptText, raw: tuple[bytes, ...], seed: int, sent: Sequence[int]
    ) -> array[int] | None:
        """Return the blocks of messages that are named by the bytes that were sent; None: some are not."""
        if not raw[-1].startswith(HEADS_OF_TEXT):
            return None
        known = self._known
        count = len(raw)
        for key in reversed(sent):
            if (hashes := known.get(key)) is not None:
                break
            count -= 1
        else:
            hashes = None
        if not are_texts(raw, count) or raw[0].startswith(HEADERS):
            return None
        text.size = sum(map(len, raw), text.size + len(raw))
        if hashes is not None and count == len(raw):
            del known[key]
            known[key] = hashes
            return hashes
        hashes = self._hash_whole(text.shape, raw, seed) if hashes is None else _continued(hashes, text)
        self._keep(sent[-1], hashes)
        return hashes

    def _find_named(self, sent: Sequence[int], kind: RequestKind, drops_header: bool) -> tuple[_Named | None, int]:
        """Return the longest beginning that came before, and its messages."""
        named = self._named
        count = len(sent)
        for key in reversed(sent):
            known = named.pop(key, None)
            if known is not None:
                named[key] = known
                if known[0] is kind and known[1] is drops_header:
                    return known, count
            count -= 1
        return None, 0

    def _name(self, sent: int, messages: _Named) -> None:
        """Its keys are not changed from now on."""
        named = self._named
        if sent in named or _size_of_named(messages) > _MAX_NAMED_BYTES:
            return
        named[sent] = messages
        self._named_bytes += _size_of_named(messages)
        while self._named_bytes > _MAX_NAMED_BYTES:
            self._named_bytes -= _size_of_named(named.pop(next(iter(named))))

    def blocks_of(self, text: PromptText, seed: int, keys: Sequence[int]) -> array[int]:
        """As `hashing.text_blocks` of a text with messages, whose keys these are. Not to be changed."""
        known = self._known
        whole = keys[-1]
        hashes = known.pop(whole, None)
        if hashes is not None:
            known[whole] = hashes
            return hashes
        for key in reversed(keys):
            earlier = known.get(key)
            if earlier is not None:
                hashes = _continued(earlier, text)
                break
        else:
            parts = map(text.part_at, range(text.parts)) if text.whole is None else text.whole
            hashes = self._hash_whole(text.shape, tuple(parts), seed)
        self._keep(whole, hashes)
        return hashes

    def _hash_whole(self, shape: bytes, parts: tuple[bytes, ...], seed: int) -> array[int]:
        """Return the text blocks of a prompt of which no message prefix is known: its text may still begin as another
        one's did, within a message too."""
        data = canonical_bytes(Prompt(shape, parts))
        known = self._pieces
        text = memoryview(data)
        hashes = array("Q")
        at = 0
        for end in range(_PIECE_BYTES, len(data) + 1, _PIECE_BYTES):
            digest = xxh3_64_intdigest(text[at:end], seed)
            if (blocks := known.get(digest)) is None:
                break
            hashes += blocks
            seed = blocks[-1]
            at = end
        hashes += text_chain(data, seed, start=at)
        self._remember_pieces(text, hashes, at, seed)
        return hashes

    def _remember_pieces(self, text: memoryview, hashes: array[int], at: int, seed: int) -> None:
        """Remember the blocks of all pieces from there on."""
        known = self._pieces
        for end in range(at + _PIECE_BYTES, len(text) + 1, _PIECE_BYTES):
            blocks = hashes[at // TEXT_BLOCK_BYTES : end // TEXT_BLOCK_BYTES]
            known[xxh3_64_intdigest(text[at:end], seed)] = blocks
            seed = blocks[-1]
            at = end
        while len(known) > _MAX_PIECES:
            del known[next(iter(known))]

    def _keep(self, key: int, hashes: array[int]) -> None:
        size = _size(hashes)
        if size > self._max_bytes or not hashes:
            return
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= _size(self._known.pop(next(iter(self._known))))
        self._known[key] = hashes


def _is_string(shape: bytes) -> bool:
    """Return True if the shape is a system prompt alone that no rule changes."""
    return shape.startswith(_STRING) and not shape.startswith(_HEADER) and shape.find(b"\0") == len(shape) - 1


def _size(hashes: array[int]) -> int:
    return _ENTRY_BYTES + hashes.itemsize * len(hashes)


def _size_of_named(messages: _Named) -> int:
    return _size(messages[2]) + _MEDIUM_BYTES * len(messages[4])


def _continued(earlier: array[int], text: PromptText) -> array[int]:
    """Return the blocks of a prompt that begins with the text of these; only messages they do not cover are
    looked at."""
    covered = TEXT_BLOCK_BYTES * len(earlier)
    first = text.parts
    offset = text.size
    parts: list[bytes] = []
    while offset > covered and first:
        first -= 1
        parts.append(text.part_at(first))
        offset -= len(parts[-1]) + 1
    parts.reverse()
    if offset > covered:  # not even the shape was
        offset = 0
        tail = canonical_bytes(Prompt(text.shape, tuple(parts)))
    else:
        tail = canonical_tail(parts)
    return earlier + text_chain(tail, earlier[-1], start=covered - offset)
