"""Messages that a client sends again with every turn: recognized by comparison with the body before, so that neither
the parser nor the guard goes over them once more. Holds texts of prompts, within a bound."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, pairwise

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.base.json_scan import MAX_DECODED_BYTES
from kvproxy.base.types import InferenceRequest, RequestKind
from kvproxy.proxy.request.parse import decode_body, decode_rest
from kvproxy.proxy.request.session import Caller

#: APIs whose bodies have messages.
CHATS = frozenset({RequestKind.CHAT, RequestKind.MESSAGES})
#: A shorter body is read sooner than compared.
MIN_BYTES = 16 * 1024
#: Texts of all bodies that are held, with where their messages start.
MAX_HELD_BYTES = 64 * 1024 * 1024

_PIECE_BYTES = 16 * 1024  # bodies are found by digests of so many bytes, chained
_TRIES = 2  # bodies that one is compared with
#: A body of fewer is the first of its chat, if there is one, and held for nothing if not.
_MIN_MESSAGES = 3
_LAST_MESSAGES = 2  # an answer and what follows it; clients move marks among them
_NAME = b'"messages":'
_SEPARATORS = (b",", b", ")


class Beginning(msgspec.Struct, eq=False):
    """How a body began: all to the end of its last message; and what came behind."""

    text: bytes
    tail: bytes
    separator: bytes
    starts: array[int]  # of its messages, and of one that would follow
    key: int
    harmless: bool = False  # the guard found no name of a medium
    plain: bool = False  # no message holds a medium

    @property
    def held_bytes(self) -> int:
        """Bytes that its texts and starts take: a message may be shorter than its start."""
        return len(self.text) + len(self.tail) + len(self.starts) * self.starts.itemsize

    def end(self, count: int) -> int:
        """Where so many messages end."""
        return self.starts[count] - len(self.separator)

    def parts(self, body: bytes, count: int) -> tuple[bytes, ...]:
        """Return so many messages of a body that has them too, and is at hand."""
        gap = len(self.separator)
        return tuple([body[at : after - gap] for at, after in pairwise(self.starts[: count + 1])])

    def fresh(self, body: bytes, rest: bytes, count: int) -> bytes:
        """Return the part of a body, with so many of these messages and this `rest`, that the guard has not passed."""
        if not self.harmless:
            return body
        tail = self.tail
        return body[self.end(count) : len(body) - len(tail)] if body.endswith(tail) else rest


class Repeats(msgspec.Struct, eq=False):
    """Messages of a body that came before."""

    rest: bytes  # the body with one short message in their place; the body itself if none came before
    fresh: bytes  # the part of the body that the guard has not passed
    beginning: Beginning | None = None  # of the body, for the next turn
    plain_messages: int = 0  # first messages that surely hold no medium

    def note_harmless(self) -> None:
        """Record that no message of the body names a medium."""
        if self.beginning is not None:
            self.beginning.harmless = True

    def note_plain(self) -> None:
        """Record that no message of the body holds a medium."""
        if self.beginning is not None:
            self.beginning.plain = True


class EarlierBodies:
    """The latest bodies by their beginnings, within a bound of bytes; the longest unused first out."""

    def __init__(self, *, max_bytes: int = MAX_HELD_BYTES, draw: Callable[[int], bytes] = os.urandom) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._known: dict[int, Beginning] = {}
        #: Stands for the messages that came before; no client can guess it.
        self._stand_in = b'{"":"%b"}' % draw(16).hex().encode()

    def __len__(self) -> int:
        return len(self._known)

    def decode(self, kind: RequestKind, body: bytes, caller: Caller) -> tuple[InferenceRequest | None, Repeats | None]:
        """As `decode_body`, for a chat of at least MIN_BYTES; None and None if it has to be scanned."""
        if len(body) > MAX_DECODED_BYTES:
            return None, None
        keys = _digests(body) if self._known else []
        if (found := self._find(body, keys)) is not None:
            known, count = found
            rest = b"".join((known.text[: known.starts[0]], self._stand_in, body[known.end(count) :]))
            request = decode_rest(kind, rest, caller, stand_in=self._stand_in, earlier=known.parts(body, count))
            if request is not None:
                kept = self._keep_grown(body, keys, request.prompt.parts, known, count)
                return request, Repeats(rest, known.fresh(body, rest, count), kept, count if known.plain else 0)
        request = decode_body(kind, body, caller)
        if request is None:
            return None, None
        return request, Repeats(body, body, self._keep_new(body, keys, request.prompt.parts))

    def _find(self, body: bytes, keys: list[int]) -> tuple[Beginning, int] | None:
        """Return the beginning that shares most with the body, and how many messages."""
        tries = _TRIES
        for key in reversed(keys):
            known = self._known.get(key)
            if known is None:
                continue
            count = _count_common(body, known)
            if count and known.end(count) >= MIN_BYTES // 2:
                return known, count
            tries -= 1
            if not tries:
                break
        return None

    def _keep_new(self, body: bytes, keys: list[int], parts: tuple[bytes, ...]) -> Beginning | None:
        """Keep a body if its messages are written as clients commonly write them."""
        at = body.find(_NAME) if len(parts) >= _MIN_MESSAGES else -1
        if at < 0:
            return None
        at += len(_NAME)
        at += body.startswith(b" ", at)
        if not body.startswith(b"[", at):
            return None
        at += 1
        separator = _SEPARATORS[body.startswith(b" ", at + len(parts[0]) + 1)]
        return self._keep(body, separator, array("Q", [at]), parts, keys or _digests(body))

    def _keep_grown(
        self, body: bytes, keys: list[int], parts: tuple[bytes, ...], known: Beginning, count: int
    ) -> Beginning | None:
        """Keep a body in place of the one that it continues."""
        kept = self._keep(body, known.separator, known.starts[: count + 1], parts[count:], keys)
        if kept is not None and len(known.starts) - 1 - count <= _LAST_MESSAGES:
            self._drop(known)
        return kept

    def _keep(
        self, body: bytes, separator: bytes, starts: array[int], parts: tuple[bytes, ...], keys: list[int]
    ) -> Beginning | None:
        """Keep a body whose further messages these are, if they begin at the last of `starts`."""
        gap = len(separator)
        if not body.startswith(separator.join(parts), starts[-1]) or not all(one.startswith(b"{") for one in parts):
            return None
        if parts and len(starts) > 1 and not body.startswith(separator, starts[-1] - gap):
            return None
        starts = starts[:-1] + array("Q", accumulate([len(one) + gap for one in parts], initial=starts[-1]))
        end = starts[-1] - gap
        pieces = end // _PIECE_BYTES
        if not pieces:
            return None
        key = keys[pieces - 1]
        made = Beginning(body[:end], body[end:], separator, starts, key)
        if made.held_bytes > self._max_bytes:
            return None
        if key in self._known:
            self._drop(self._known[key])
        self._known[key] = made
        self.held_bytes += made.held_bytes
        while self.held_bytes > self._max_bytes:
            self._drop(next(iter(self._known.values())))
        return made

    def _drop(self, known: Beginning) -> None:
        if self._known.get(known.key) is known:
            del self._known[known.key]
            self.held_bytes -= known.held_bytes


def _digests(body: bytes) -> list[int]:
    """Return one for each beginning of whole pieces."""
    text = memoryview(body)
    digest = 0
    ends = range(_PIECE_BYTES, len(body) + 1, _PIECE_BYTES)
    return [digest := xxh3_64_intdigest(text[end - _PIECE_BYTES : end], digest) for end in ends]


def _count_common(body: bytes, known: Beginning) -> int:
    """Return how many messages the body has from there, in the same bytes; mostly all."""
    text = known.text
    count = len(known.starts) - 1
    if body.startswith(text):
        return count
    if not body.startswith(text[: known.starts[0]]):
        return 0
    return bisect_left(range(1, count), True, key=lambda one: not body.startswith(text[: known.end(one)]))
