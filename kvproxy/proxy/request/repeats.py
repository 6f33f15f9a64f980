"""Messages that a client sends again with every turn: recognized by comparison with the body before, so that neither
the parser nor the guard goes over them once more. Holds texts of prompts, within a bound."""

from __future__ import annotations

import os
from collections.abc import Callable

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
#: Texts of all bodies that are held.
MAX_HELD_BYTES = 64 * 1024 * 1024

_PIECE_BYTES = 16 * 1024  # bodies are found by digests of so many bytes, chained
_TRIES = 2  # bodies that one is compared with
#: A body of fewer is the first of its chat, if there is one, and held for nothing if not.
_MIN_MESSAGES = 3
_LAST_MESSAGES = 2  # an answer and what follows it; clients move marks among them
_NAME = b'"messages":'
_SEPARATORS = (b",", b", ")


class Beginning(msgspec.Struct, eq=False):
    """How a body began: all in front of its messages, and these."""

    head: bytes
    separator: bytes
    parts: tuple[bytes, ...]
    end: int  # where the last message ends
    key: int
    harmless: bool = False  # the guard found no name of a medium


class Repeats(msgspec.Struct, eq=False):
    """Messages of a body that came before."""

    rest: bytes  # the body with one short message in their place; the body itself if none came before
    harmless: bool  # the guard has found nothing in them
    beginning: Beginning | None = None  # of the body, for the next turn

    def note_harmless(self) -> None:
        """Record that no message of the body names a medium."""
        if self.beginning is not None:
            self.beginning.harmless = True


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
            known, count, end = found
            rest = b"".join((known.head, self._stand_in, body[end:]))
            request = decode_rest(kind, rest, caller, stand_in=self._stand_in, earlier=known.parts[:count])
            if request is not None:
                kept = self._keep_grown(body, keys, request.prompt.parts, known, count, end)
                return request, Repeats(rest, known.harmless, kept)
        request = decode_body(kind, body, caller)
        if request is None:
            return None, None
        return request, Repeats(body, True, self._keep_new(body, keys, request.prompt.parts))

    def _find(self, body: bytes, keys: list[int]) -> tuple[Beginning, int, int] | None:
        """Return the beginning that shares most with the body, how many messages, and where the last of these ends."""
        tries = _TRIES
        for key in reversed(keys):
            known = self._known.get(key)
            if known is None:
                continue
            count, end = _count_common(body, known)
            if end >= MIN_BYTES // 2:
                return known, count, end
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
        head = body[: at + 1]
        separator = _SEPARATORS[body.startswith(b" ", len(head) + len(parts[0]) + 1)]
        written = separator.join(parts)
        if not body.startswith(written, len(head)):
            return None
        if not all(part.startswith(b"{") for part in parts):
            return None
        return self._keep(head, separator, parts, len(head) + len(written), keys or _digests(body))

    def _keep_grown(
        self, body: bytes, keys: list[int], parts: tuple[bytes, ...], known: Beginning, count: int, end: int
    ) -> Beginning | None:
        """Keep a body in place of the one that it continues."""
        if count < len(parts):
            written = known.separator + known.separator.join(parts[count:])
            if not body.startswith(written, end) or not all(part.startswith(b"{") for part in parts[count:]):
                return None
            end += len(written)
        if len(known.parts) - count <= _LAST_MESSAGES:
            self._drop(known)
        return self._keep(known.head, known.separator, parts, end, keys)

    def _keep(
        self, head: bytes, separator: bytes, parts: tuple[bytes, ...], end: int, keys: list[int]
    ) -> Beginning | None:
        pieces = end // _PIECE_BYTES
        if not pieces or end > self._max_bytes:
            return None
        key = keys[pieces - 1]
        if key in self._known:
            self._drop(self._known[key])
        made = self._known[key] = Beginning(head, separator, parts, end, key)
        self.held_bytes += end
        while self.held_bytes > self._max_bytes:
            self._drop(next(iter(self._known.values())))
        return made

    def _drop(self, known: Beginning) -> None:
        if self._known.get(known.key) is known:
            del self._known[known.key]
            self.held_bytes -= known.end


def _digests(body: bytes) -> list[int]:
    """Return one for each beginning of whole pieces."""
    text = memoryview(body)
    digest = 0
    ends = range(_PIECE_BYTES, len(body) + 1, _PIECE_BYTES)
    return [digest := xxh3_64_intdigest(text[end - _PIECE_BYTES : end], digest) for end in ends]


def _count_common(body: bytes, known: Beginning) -> tuple[int, int]:
    """Return how many messages the body has from there, in the same bytes, and where the last one ends; mostly all."""
    parts = known.parts
    separator = known.separator
    end = len(known.head)
    if not body.startswith(known.head):
        return 0, 0
    count = 0
    most = guess = len(parts)
    while count < most:
        written = separator.join((b"", *parts[count:guess]) if count else parts[:guess])
        if body.startswith(written, end):
            count = guess
            end += len(written)
        else:
            most = guess - 1
        guess = (count + most + 1) // 2
    return count, end
