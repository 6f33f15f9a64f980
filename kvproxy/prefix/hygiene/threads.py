"""The last prompt of each conversation of a session, as digests, bounded in sessions, conversations and bytes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvproxy.prefix.hygiene.parts import Head, Heads, digest_part
from kvproxy.prefix.tokens.session_hashes import PromptText
from kvproxy.types import EndpointId

#: Conversations of one session: an agent, its sub-agents and its side requests often share a key.
MAX_THREADS = 16
#: An object with two small arrays, and a session's list and key.
_THREAD_BYTES, _SESSION_BYTES = 400, 300
_MESSAGE_BYTES = 12

SessionKey = tuple[str, str]  # tenant, session


class Thread:
    """One conversation's last prompt that an engine prefilled."""

    __slots__ = (
        "at",
        "digests",
        "endpoint",
        "head",
        "header",
        "last_key",
        "model",
        "parts",
        "prompt_tokens",
        "sizes",
    )

    def __init__(self, model: str, keys: Sequence[int], text: PromptText, head: Head, *, header: int = 0) -> None:
        self.model = model
        self.head = head
        self.header = header  # that it began with, which is no part of its text; 0: none
        self.parts = len(keys)  # messages, the head's leading ones included
        self.last_key = keys[-1]  # names all of the prompt
        messages = [text.part_at(index) for index in range(head.leading, len(keys))]
        self.digests = array("Q", map(digest_part, messages))  # of the messages after the head
        self.sizes = array("I", map(len, messages))
        self.prompt_tokens = 0  # by its engine's count; 0: unknown
        self.endpoint: EndpointId | None = None  # that holds it
        self.at = 0.0  # when its request was over

    @property
    def held_bytes(self) -> int:
        """About; what heads have in common counts for each thread."""
        return _THREAD_BYTES + self.head.held_bytes + _MESSAGE_BYTES * len(self.digests)

    def grow(self, keys: Sequence[int], text: PromptText) -> int:
        """It went on with these messages; the further bytes held."""
        before, parts = self.parts, len(keys)
        for index in range(before, parts):
            message = text.part_at(index)
            self.digests.append(digest_part(message))
            self.sizes.append(len(message))
        self.parts, self.last_key = parts, keys[-1]
        return _MESSAGE_BYTES * (parts - before)

    def prefilled(self, endpoint: EndpointId, prompt_tokens: int | None, now: float) -> None:
        """An engine has all of it."""
        self.endpoint, self.prompt_tokens, self.at = endpoint, prompt_tokens or 0, now


class Session:
    """Threads, the latest last."""

    __slots__ = ("forgot", "held_bytes", "threads")

    def __init__(self) -> None:
        self.threads: list[Thread] = []
        self.held_bytes = _SESSION_BYTES
        self.forgot = False  # there were more conversations than are kept

    def continued_by(self, keys: Sequence[int]) -> Thread | None:
        """The longest of the threads whose last prompt this one begins with, or is. A key names model, salt, head and
        all messages up to its own, so this is all there is to compare."""
        found, count = None, len(keys)
        for thread in self.threads:
            parts = thread.parts
            if parts <= count and keys[parts - 1] == thread.last_key and (found is None or parts > found.parts):
                found = thread
        return found


class Sessions:
    """Sessions by tenant and key, the longest unused first out. Prompts are never kept.

    A dict in order of use, with the bytes counted by hand: its entries grow while they are held (bounded.py).
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
        """The session, made on first use."""
        sessions = self._sessions
        session = sessions.pop(key, None)
        if session is None:
            session = Session()
            self._bytes += session.held_bytes
        sessions[key] = session
        return session

    def forget(self, key: SessionKey) -> None:
        """The session is over."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._bytes -= session.held_bytes

    def add(self, session: Session, thread: Thread, *, instead_of: Thread | None = None) -> None:
        """A further thread of the session in use, in place of the one that it took the place of."""
        if instead_of is not None:
            session.threads.remove(instead_of)
            self._grew(session, -instead_of.held_bytes)
        elif len(session.threads) == MAX_THREADS:
            session.forgot = True
            self._grew(session, -session.threads.pop(0).held_bytes)
        session.threads.append(thread)
        self._grew(session, thread.held_bytes)
        self._make_room()

    def grew(self, session: Session, added_bytes: int) -> None:
        """A thread of the session in use grew by so much."""
        if added_bytes:
            self._grew(session, added_bytes)
            if self._bytes > self.max_bytes:
                self._make_room()

    def _grew(self, session: Session, added_bytes: int) -> None:
        session.held_bytes += added_bytes
        self._bytes += added_bytes

    def _make_room(self) -> None:
        """One that is larger than all the room there is goes too."""
        while self._bytes > self.max_bytes or len(self._sessions) > self._max_sessions:
            oldest = next(iter(self._sessions))
            self._bytes -= self._sessions.pop(oldest).held_bytes
