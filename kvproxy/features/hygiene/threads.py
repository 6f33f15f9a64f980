"""The last prompt of each conversation of a session, as digests, bounded in sessions, conversations and bytes. Never
text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.base.types import EndpointId
from kvproxy.cache.prefix.session_hashes import PromptText
from kvproxy.features.hygiene.parts import SEED, Head, Heads

#: Conversations of one session: an agent, its sub-agents and its side requests often share a key.
MAX_THREADS = 16
#: An object with two small arrays, and a session's list and key.
_THREAD_BYTES = 400
_SESSION_BYTES = 300
_MESSAGE_BYTES = 8
#: Bits of a message's number for its length, which is bounded by that of all prompts; the rest is its digest.
LENGTH = (1 << 24) - 1
DIGEST = (1 << 64) - 1 - LENGTH

SessionKey = tuple[str, str]  # tenant, session


def add_messages(messages: array[int], text: PromptText, first: int, count: int) -> None:
    """Add a number for each of these messages of the text; its lowest bits are the message's length, as far as they
    suffice."""
    part_at = text.part_at
    digest = xxh3_64_intdigest
    seed = SEED
    for index in range(first, count):
        part = part_at(index)
        size = len(part)
        messages.append(digest(part, seed) & DIGEST | (size if size < LENGTH else LENGTH))


class Thread(msgspec.Struct, eq=False, gc=False):
    """One conversation's last prompt that an engine prefilled. (A struct: one is made in C.)"""

    model: str
    blocks: array[int]  # of its text, as the approximate index has them; not to be changed
    head: Head
    header: int  # that it began with, which is no part of its text; 0: none
    parts: int  # messages, the head's leading ones included
    last_key: int  # names all of the prompt
    #: A digest of each message after the head, with its length in the lowest bits: one number, since every turn
    #: adds some.
    messages: array[int]
    prompt_tokens: int = 0  # by its engine's count; 0: unknown
    endpoint: EndpointId | None = None  # that holds it
    at: float = 0.0  # when its request was over
    proved: bool = False  # an engine was seen to reuse it

    @classmethod
    def begun(
        cls, model: str, keys: Sequence[int], blocks: array[int], text: PromptText, head: Head, *, header: int = 0
    ) -> Thread:
        """By its first prompt."""
        messages = array("Q")
        add_messages(messages, text, head.leading, len(keys))
        return cls(model, blocks, head, header, len(keys), keys[-1], messages)

    @property
    def held_bytes(self) -> int:
        """About; what heads have in common counts for each thread."""
        return _THREAD_BYTES + self.head.held_bytes + _MESSAGE_BYTES * len(self.messages) + 8 * len(self.blocks)


class Session:
    """Threads, the latest last."""

    __slots__ = ("forgot", "held_bytes", "threads", "used")

    def __init__(self) -> None:
        self.threads: list[Thread] = []
        self.used = True  # used since the last check
        self.held_bytes = _SESSION_BYTES
        self.forgot = False  # there were more conversations than are kept

    def continued_by(self, keys: Sequence[int]) -> Thread | None:
        """Return the longest of the threads whose last prompt this one begins with, or is. A key names model, salt,
        head and all messages up to its own, so this is all there is to compare."""
        found = None
        longest = 0
        count = len(keys)
        for thread in self.threads:
            if longest < (parts := thread.parts) <= count and keys[parts - 1] == thread.last_key:
                found = thread
                longest = parts
        return found


class Sessions:
    """Sessions by tenant and key; the oldest that are not in use are forgotten. Prompts are never kept.

    A dict with the bytes counted by hand: its entries grow while they are held (bounded.py), and each request looks one
    up. That one was used is noted in it, which is cheaper than to put it last.
    """

    def __init__(self, *, max_sessions: int = 4096, max_bytes: int = 16 * 1024 * 1024) -> None:
        self.heads = Heads()
        self.max_bytes = max_bytes
        self._max_sessions = max_sessions
        self._sessions: dict[SessionKey, Session] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def held_bytes(self) -> int:
        """Bytes held, about."""
        return self._bytes + self.heads.held_bytes

    def use(self, key: SessionKey) -> Session:
        """Return the session, made on first use."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session()
            self._bytes += session.held_bytes
        else:
            session.used = True
        return session

    def forget(self, key: SessionKey) -> None:
        """Forget a session that ended."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._bytes -= session.held_bytes

    def add(self, session: Session, thread: Thread, *, instead_of: Thread | None = None) -> None:
        """Add a thread of the session in use, in place of `instead_of`."""
        if instead_of is not None:
            session.threads.remove(instead_of)
            self._grew(session, -instead_of.held_bytes)
        elif len(session.threads) == MAX_THREADS:
            session.forgot = True
            self._grew(session, -session.threads.pop(0).held_bytes)
        session.threads.append(thread)
        self._grew(session, thread.held_bytes)
        self._make_room()

    def go_on(
        self, session: Session, thread: Thread, keys: Sequence[int], blocks: array[int], text: PromptText
    ) -> None:
        """Continue a thread of the session in use with these messages. (All in one call, since every turn runs it.)"""
        parts = thread.parts
        count = len(keys)
        added_bytes = 8 * (len(blocks) - len(thread.blocks))
        if count > parts:
            add_messages(thread.messages, text, parts, count)
            thread.parts = count
            added_bytes += _MESSAGE_BYTES * (count - parts)
        thread.last_key = keys[-1]
        thread.blocks = blocks
        session.held_bytes += added_bytes
        self._bytes += added_bytes
        if self._bytes > self.max_bytes:
            self._make_room()

    def _grew(self, session: Session, added_bytes: int) -> None:
        session.held_bytes += added_bytes
        self._bytes += added_bytes

    def _make_room(self) -> None:
        """Drop the oldest session, unless it was used since; also one that is larger than the bound."""
        sessions = self._sessions
        while self._bytes > self.max_bytes or len(sessions) > self._max_sessions:
            oldest = next(iter(sessions))
            session = sessions.pop(oldest)
            if session.used and session.held_bytes <= self.max_bytes:
                session.used = False
                sessions[oldest] = session
            else:
                self._bytes -= session.held_bytes
