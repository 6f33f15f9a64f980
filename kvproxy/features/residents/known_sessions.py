"""Sessions that are known, found again by their prompts and names. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.features.residents.resident_set import Session

#: Blocks at the end of a prompt, 256 bytes each, among which the session's last prompt ends.
_LOOKED_AT = 512


class KnownSessions:
    """Those of one cluster, and the order in which they began to pause."""

    def __init__(self) -> None:
        self._by_tail: dict[int, Session] = {}
        self._by_name: dict[int, Session] = {}
        # In order, and no plain dicts: these look for their first entry among all that were before it.
        self.paused: OrderedDict[Session, None] = OrderedDict()  # between turns, the longest first
        self.idle: OrderedDict[Session, None] = OrderedDict()  # residents among them, likewise
        self.found: tuple[Sequence[int], Session | None] = (), None  # for the blocks of the latest question

    def __len__(self) -> int:
        return len(self._by_tail)

    def find(self, facts: OverlapFacts) -> Session | None:
        """Return the session between turns that a prompt continues: the one that its client names, or else the one
        whose last prompt it begins with."""
        blocks = facts.blocks
        name = facts.session
        found = next(filter(None, map(self._by_tail.get, blocks[: -_LOOKED_AT - 1 : -1])), None)
        if found is not None and facts.prompt_tokens <= found.tokens:  # the same prompt again: no turn of a session
            found = None
        if name and (found is None or (found.name and found.name != name)):  # a fork, or a context written anew
            found = self._by_name.get(name)
            if found is not None and found.head != blocks[0]:
                found = None
        # of a turn elsewhere the end is reported late: its client has the answer
        if found is not None and found.running and not found.elsewhere:
            found = None
        self.found = blocks, found
        return found

    def enter(self, session: Session, facts: OverlapFacts, now: float) -> None:
        """Begin a session's turn with this prompt, by which it is found now, and no longer by an earlier one."""
        self.paused.pop(session, None)
        self.idle.pop(session, None)
        if self._by_tail.get(session.tail) is session:
            del self._by_tail[session.tail]
        self._by_tail[facts.blocks[-1]] = session
        if facts.session:
            session.name = facts.session
            session.parent = facts.parent
            self._by_name[facts.session] = session
            self.await_child(session, now)

    def pause(self, session: Session) -> None:
        """Put a session between turns behind those that paused before."""
        self.paused.pop(session, None)
        self.paused[session] = None
        self.idle.pop(session, None)
        if session.home is not None:
            self.idle[session] = None

    def resume(self, session: Session) -> None:
        """Count a session as between turns no longer."""
        self.paused.pop(session, None)
        self.idle.pop(session, None)

    def await_child(self, session: Session, now: float) -> None:
        """Expect the parent of a session only after the session's own turns."""
        parent = self._by_name.get(session.parent)
        if parent is not None and not parent.running and parent in self.paused:
            parent.ended_at = now
            self.pause(parent)

    def forget(self, session: Session) -> None:
        """Forget a session, which gives up its room."""
        session.leave()
        self.resume(session)
        if self._by_tail.get(session.tail) is session:
            del self._by_tail[session.tail]
        if self._by_name.get(session.name) is session:
            del self._by_name[session.name]
