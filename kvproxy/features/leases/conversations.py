"""Conversations that are expected back, between an answer and their next turn: found by the prompt that goes on, or by
their session."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvproxy.base.types import EndpointId

#: Answers whose next turns are expected; the longest waiting are dropped first.
MAX_WAITING = 16_384
#: A conversation that did not go on for this long is no longer expected; no lease is longer.
HORIZON_S = 3600.0
#: Message prefixes by which the first and last turns of a conversation differ, at most.
LOOKED_AT = 17


@dataclass(frozen=True, slots=True)
class IdleConversation:
    """A conversation between an answer and its next turn, known by the key of its last prompt."""

    key: int
    ended_at: float
    endpoint: EndpointId
    cluster: str
    tenant: str = ""
    session: int = 0  # 0: it names none
    calls_tool: bool = True
    asked_s: float | None = None  # that its client wants the prompt to be kept


class BySession:
    """Keys of each session; those without one are left out."""

    def __init__(self) -> None:
        self._keys: dict[int, set[int]] = {}

    def add(self, of: IdleConversation) -> None:
        """One more."""
        if of.session:
            self._keys.setdefault(of.session, set()).add(of.key)

    def discard(self, of: IdleConversation) -> None:
        """One less, if it is there."""
        keys = self._keys.get(of.session, set())
        keys.discard(of.key)
        if not keys:
            self._keys.pop(of.session, None)

    def keys_of(self, session: int) -> Collection[int]:
        """As they are now."""
        return tuple(self._keys.get(session, ()))


class Conversations:
    """Conversations that may go on, by key, the longest waiting first."""

    def __init__(self) -> None:
        self._waiting: dict[int, IdleConversation] = {}
        self._sessions = BySession()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def get(self, key: int) -> IdleConversation | None:
        """Return the one whose last prompt has this key."""
        return self._waiting.get(key)

    def add(self, waiting: IdleConversation) -> None:
        """Add a conversation after its answer."""
        self._take(waiting.key)
        self._waiting[waiting.key] = waiting
        self._sessions.add(waiting)
        if len(self._waiting) > MAX_WAITING:
            self._take(next(iter(self._waiting)))

    def take_returned(self, keys: Sequence[int]) -> IdleConversation | None:
        """Return the one that a prompt with these message prefixes goes on from."""
        return next((found for key in reversed(keys[-LOOKED_AT:]) if (found := self._take(key)) is not None), None)

    def forget_late(self, now: float) -> None:
        """Forget conversations that wait for too long and are not expected back."""
        for first in self._late(now):
            self._take(first.key)

    def end_session(self, session: int) -> None:
        """Nothing more comes of it."""
        for key in self._sessions.keys_of(session):
            self._take(key)

    def _late(self, now: float) -> Iterator[IdleConversation]:
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if now - first.ended_at <= HORIZON_S:
                return
            yield first

    def _take(self, key: int) -> IdleConversation | None:
        found = self._waiting.pop(key, None)
        if found is not None:
            self._sessions.discard(found)
        return found


_finished = re.compile(rb'"(?:finish|stop)_reason"\s?:\s?"tool_(?:calls|use)"').search
_item = re.compile(rb'"type"\s?:\s?"(?:function_call|custom_tool_call|local_shell_call|computer_call)"').search


class ToolCallDetector:
    """Detector for one answer. The searched texts cannot be in generated text, whose quotes are escaped; one split by
    the network goes unseen. Items of Responses count at once: their end gives no other reason than that they are
    complete."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = False

    def read_piece(self, piece: bytes) -> None:
        """Read a piece of the answer."""
        if (b'"tool_' in piece and _finished(piece)) or (b'_call"' in piece and _item(piece)):
            self.found = True
