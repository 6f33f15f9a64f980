"""Hashes only the new tail of a chat whose earlier turn was hashed before."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvproxy.prefix.hashing import (
    TEXT_BLOCK_BYTES,
    canonical_bytes,
    canonical_tail,
    chain,
    message_chain,
    mix_keys,
    text_blocks,
)
from kvproxy.prefix.prompt_identity import RULED, PartRules, rough_shape, shape_identity
from kvproxy.types import Prompt, RequestKind

_MAX_NAMED_BYTES = 16 * 1024 * 1024
_ENTRY_BYTES = 250  # an entry's objects besides the hashes themselves
#: Marked messages of one prompt before each of which the chat is kept as it began: the API takes four marks.
_MARKS = 4
#: What keeps messages as they were sent apart by the rules for them.
_APART = {
    (kind, drops_header): mix_keys(1, (kind.value, drops_header)) for kind in RULED for drops_header in (False, True)
}


class _Named(NamedTuple):
    """Messages that came before: their keys, and the bytes that name them."""

    keys: array[int]
    size: int


class PromptText:
    """The bytes that name a prompt, by message."""

    __slots__ = ("_shape", "part_at", "parts", "size")

    def __init__(
        self, shape: bytes | Callable[[], bytes], part_at: Callable[[int], bytes], parts: int, size: int
    ) -> None:
        self.part_at, self.parts = part_at, parts
        self.size = size  # of `canonical_bytes`
        self._shape = shape

    @property
    def shape(self) -> bytes:
        """Made when it is asked for: of a chat's next turn it seldom is."""
        if not isinstance(self._shape, bytes):
            self._shape = self._shape()
        return self._shape


class SessionHashes:
    """Text blocks by message prefix, bounded by bytes, the longest unused first out. Holds no prompt text.

    A key names all the text it stands for (seed, shape and messages), so what is found under it needs no comparing.
    The entries are a dict in order of use: every request comes by, and a BoundedMapping takes a third longer (4.1 us
    against 3.1 for a chat's next turn, 35 calls against 26).
    """

    def __init__(self, *, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._known: dict[int, array[int]] = {}
        self._named: dict[int, _Named] = {}  # by the messages as they were sent
        self._named_bytes = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def held_bytes(self) -> int:
        """Bytes held, objects included."""
        return self._bytes + self._named_bytes

    def text_blocks(self, prompt: Prompt, seed: int, keys: Sequence[int]) -> array[int]:
        """As `hashing.text_blocks`; `keys` is the prompt's `message_chain` of the same seed. The result is not to be
        changed."""
        if not keys:
            return text_blocks(prompt, seed)
        size = len(prompt.shape) + 1 + sum(map(len, prompt.parts)) + len(prompt.parts)
        return self._blocks(PromptText(prompt.shape, prompt.parts.__getitem__, len(prompt.parts), size), seed, keys)

    def identified(
        self, kind: RequestKind, prompt: Prompt, seed: int, *, drops_header: bool = True
    ) -> tuple[array[int], Sequence[int], int, PromptText | None]:
        """The text blocks, the message keys and the bytes of the prompt's identity, and its text, for a kind whose
        messages have rules. Only messages that did not come in the same bytes before are looked at."""
        rules, raw = PartRules(kind, drops_header=drops_header), prompt.parts
        rough = rough_shape(kind, prompt.shape, drops_header=drops_header)
        if not raw:
            shape = shape_identity(kind, prompt.shape, drops_header=drops_header)
            return text_blocks(Prompt(shape, ()), seed), (), len(shape), None
        roughly = prompt if rough is prompt.shape else Prompt(rough, raw)
        sent = message_chain(roughly, seed ^ _APART[kind, drops_header])
        known, count = self._find_named(sent)
        make_shape = partial(shape_identity, kind, prompt.shape, drops_header=drops_header)
        text = PromptText(make_shape, raw.__getitem__, len(raw), 0)
        if known is None:
            keys, size = array("Q"), len(text.shape) + 1
        else:
            keys, size = known.keys[:], known.size
        key = keys[-1] if keys else xxh3_64_intdigest(text.shape, seed)
        new: list[bytes] = []
        marks: list[tuple[int, int]] = []  # where a marked message stands, and the bytes that name what is before it
        for index in range(count, len(raw)):
            marked = rules.marked
            part = rules.apply(index, raw[index])
            if index > count and rules.marked > marked:
                marks.append((index, size))
            new.append(part)
            size += len(part) + 1
            key = xxh3_64_intdigest(part, key)
            keys.append(key)
        for index, size_before in marks[-_MARKS:]:  # how the chat begins when the mark has moved on
            self._name(sent[index - 1], keys[:index], size_before)
        if new:
            self._name(sent[-1], keys, size)

        def part_at(index: int) -> bytes:
            return new[index - count] if index >= count else rules.apply(index, raw[index])

        prompt_bytes = size - 1 - len(raw) + prompt.unread_bytes  # what ends the parts is none of it
        text.part_at, text.size = part_at, size
        return self._blocks(text, seed, keys), keys, prompt_bytes, text

    def _find_named(self, sent: Sequence[int]) -> tuple[_Named | None, int]:
        """The longest beginning that came before, and its messages."""
        named = self._named
        for count in range(len(sent), 0, -1):
            known = named.pop(sent[count - 1], None)
            if known is not None:
                named[sent[count - 1]] = known
                return known, count
        return None, 0

    def _name(self, sent: int, keys: array[int], size: int) -> None:
        """Neither is changed from now on."""
        named = self._named
        if sent in named or _size(keys) > _MAX_NAMED_BYTES:
            return
        named[sent] = _Named(keys, size)
        self._named_bytes += _size(keys)
        while self._named_bytes > _MAX_NAMED_BYTES:
            self._named_bytes -= _size(named.pop(next(iter(named))).keys)

    def _blocks(self, text: PromptText, seed: int, keys: Sequence[int]) -> array[int]:
        known, whole = self._known, keys[-1]
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
            hashes = text_blocks(Prompt(text.shape, tuple(map(text.part_at, range(text.parts)))), seed)
        self._keep(whole, hashes)
        return hashes

    def _keep(self, key: int, hashes: array[int]) -> None:
        size = _size(hashes)
        if size > self._max_bytes or not hashes:
            return
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= _size(self._known.pop(next(iter(self._known))))
        self._known[key] = hashes


def _size(hashes: array[int]) -> int:
    return _ENTRY_BYTES + hashes.itemsize * len(hashes)


def _continued(earlier: array[int], text: PromptText) -> array[int]:
    """The blocks of a prompt that begins with the text of these; only messages they do not cover are looked at."""
    covered = TEXT_BLOCK_BYTES * len(earlier)
    first, offset = text.parts, text.size
    parts: list[bytes] = []
    while offset > covered and first:
        first -= 1
        parts.append(text.part_at(first))
        offset -= len(parts[-1]) + 1
    parts.reverse()
    if offset > covered:  # not even the shape was
        offset, tail = 0, canonical_bytes(Prompt(text.shape, tuple(parts)))
    else:
        tail = canonical_tail(parts)
    return earlier + chain(tail, TEXT_BLOCK_BYTES, earlier[-1], start=covered - offset)
