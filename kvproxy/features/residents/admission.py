"""Sessions are admitted, not requests: the rule by which a session begins only where an engine's memory has room for
it until its end.

Once the contexts of all running agents exceed the engines' memory, each turn evicts what the next one needs, and nearly
everything is computed again. So each engine has residents: sessions whose contexts it is to keep between their turns.
Turns of residents never wait. Others wait in the router queue until an engine has room for their whole context beside
those of its residents. Sessions are recognized by their prompts, each of which continues the one before. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Candidate, OverlapFacts, PickRequest
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.features.residents.habits import HORIZON_S, Habits
from kvproxy.features.residents.note import NOTE, SessionTurn
from kvproxy.features.residents.resident_set import ResidentSet, Session

#: Share of an engine's memory up to which sessions are admitted, and at which the youngest gives way.
ADMIT_BELOW = 0.9
GIVE_WAY_AT = 0.98
#: Share of the sessions' pauses in which an engine computes contexts again before one gives way.
RECOMPUTED = 0.25
#: Bound on the sessions that are known; the longest idle are forgotten first.
MAX_SESSIONS = 65_536
#: Sessions that got room of late, by which the rate is measured at which it becomes free.
_ADMITTED = 64
_RATE_KNOWN = 8
#: Blocks at the end of a prompt, 256 bytes each, among which the session's last prompt ends.
_LOOKED_AT = 512


class SessionStay(msgspec.Struct, eq=False):
    """One turn of a session, from its placement to its end."""

    _admission: SessionAdmission
    _session: Session
    #: As of Stay; none of a single request.
    note: tuple[str, SessionTurn] | None
    last: bool = False
    calls_tool: bool = True

    def end(self, now: float, *, served: bool) -> None:
        """As of Stay."""
        self._session.calls_tool = self.calls_tool
        self._admission.turn_ended(self._session, now, goes_on=served and not self.last)


class SessionWait:
    """A turn of a session that waits for room, or for its turn in the queue alone."""

    __slots__ = ("_admission", "asked", "began_at", "is_over", "request", "reserved", "session", "tokens")

    def __init__(
        self, admission: SessionAdmission, request: PickRequest, session: Session | None, tokens: float, now: float
    ) -> None:
        self._admission = admission
        self.request = request
        self.session = session  # None: it begins
        self.tokens = tokens
        self.began_at = now
        self.reserved: EndpointId | None = None  # endpoint whose room is kept for it
        self.is_over = False
        self.asked = 0, 0  # numbers of the latest questions whether there is room for it, the last one last

    def has_room(self, candidates: Sequence[Candidate], now: float) -> bool:
        """As of RoomWait."""
        return self._admission.has_room(self, candidates, now)

    def over(self, now: float) -> None:
        """As of RoomWait."""
        self._admission.wait_over(self, now)

    def describe(self, now: float) -> dict[str, object]:
        """For people."""
        waited_s = round(now - self.began_at, 1)
        begins = self.session is None
        return {"waited_s": waited_s, "tokens": round(self.tokens), "begins": begins, "endpoint": self.reserved}


class SessionAdmission:
    """The rule of one cluster."""

    def __init__(self, *, on_give_way: Callable[[], None] = lambda: None) -> None:
        self.habits = Habits()
        self.speeds: SpeedModel | None = None
        self._on_give_way = on_give_way
        self.sets: dict[EndpointId, ResidentSet] = {}
        self.waits: dict[SessionWait, None] = {}
        self.given_way = 0  # residents so far whose room was needed by others
        self._by_tail: dict[int, Session] = {}
        self._by_name: dict[int, Session] = {}
        # In order, and no plain dicts: these look for their first entry among all that were before it.
        self._idle: OrderedDict[Session, None] = OrderedDict()  # residents between turns, the longest idle first
        self._known: OrderedDict[Session, None] = OrderedDict()  # all between turns, likewise
        self._reserved: dict[EndpointId, tuple[SessionWait, EndpointLoad]] = {}
        self.kept_elsewhere = set[EndpointId]()
        self._found: tuple[Sequence[int], Session | None] = (), None  # by the latest question
        self._turns_elsewhere: dict[Hashable, tuple[Session, int]] = {}  # and which turns of their sessions they are
        self._asked = 0  # questions whether there is room
        self._shares = False  # whether another router places requests as well
        self._granted = (0, 0.0)  # last block of the prompt that waited last, and for how many seconds
        #: Times and tokens of those that got room since some wait; the first is when the first of them began to.
        self._admitted: deque[tuple[float, float]] = deque(maxlen=_ADMITTED)

    @property
    def sessions(self) -> int:
        """Sessions known."""
        return len(self._by_tail)

    def find_limits(self, capacity_tokens: int) -> tuple[float, float]:
        """Return the tokens of contexts up to which sessions are admitted, and beyond which the youngest gives way.
        There are no limits where an engine has the time to compute all that its memory holds while they pause."""
        recomputed_tokens = 0.0 if self.speeds is None else self.habits.pause_s / self.speeds.seconds[1]
        if recomputed_tokens >= capacity_tokens:
            return math.inf, math.inf
        return ADMIT_BELOW * capacity_tokens, GIVE_WAY_AT * capacity_tokens + RECOMPUTED * recomputed_tokens

    def restrict(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> PickRequest:
        """As of Admission."""
        if request.excluded:
            candidates = _allowed(request, candidates)
        blocks = request.facts.blocks
        if not blocks or not candidates:
            return request
        self.expire(now)
        session = self._find(request.facts)
        self._found = blocks, session
        if blocks[0] not in self.habits.returning:
            return request
        if not (self.waits or self.kept_elsewhere):
            # All sessions fit: the policy's choice among all endpoints costs less than another one.
            for one in candidates:
                if self._missing_tokens(one, session, request) <= 0.0:
                    return request
            return msgspec.structs.replace(request, waits_for_room=True)
        full = [one.id for one in candidates if self._missing_tokens(one, session, request) > 0.0]
        if not full:
            return request
        if len(full) == len(candidates):
            return msgspec.structs.replace(request, waits_for_room=True)
        return msgspec.structs.replace(request, excluded=request.excluded.union(full))

    def place(self, request: PickRequest, endpoint: EndpointId, now: float) -> SessionStay | None:
        """As of Admission."""
        facts = request.facts
        blocks = facts.blocks
        if not blocks:
            return None
        asked, session = self._found
        if asked is not blocks or (session is not None and session.running):
            session = self._find(facts)
        # one that waited for too long passes without a place
        session = self._begin_turn(session, facts, endpoint, now, has_place=not request.waits_for_room)
        session.elsewhere = False
        granted, waited_s = self._granted
        if granted != blocks[-1]:
            waited_s = 0.0
        note = None
        if session.stays or waited_s:
            note = NOTE, SessionTurn(session.turns, session.endpoint is not None, round(waited_s, 3))
        return SessionStay(self, session, note)

    def placed_elsewhere(self, turn: Hashable, facts: OverlapFacts, endpoint: EndpointId, now: float) -> None:
        """As of Admission."""
        blocks = facts.blocks
        if not blocks:
            return
        self.expire(now)
        session = self._begin_turn(self._find(facts), facts, endpoint, now, has_place=True)
        session.elsewhere = True
        self._turns_elsewhere[turn] = session, session.turns
        self._shares = True

    def ended_elsewhere(self, turn: Hashable, now: float, *, served: bool, calls_tool: bool) -> None:
        """As of Admission."""
        session, number = self._turns_elsewhere.pop(turn, (None, 0))
        if session is not None and session.turns == number:  # else its next turn has come here already
            session.calls_tool = calls_tool
            self.turn_ended(session, now, goes_on=served)

    def _begin_turn(
        self, session: Session | None, facts: OverlapFacts, endpoint: EndpointId, now: float, *, has_place: bool
    ) -> Session:
        """Count the next turn of a session (None: its first)."""
        blocks = cast("array[int]", facts.blocks)
        tail = blocks[-1]
        if session is None:
            session = Session(tail, blocks[0], len(blocks), facts.prompt_tokens, now)
        else:
            self._return(session, facts.prompt_tokens, now)
        if facts.session:
            session.name = facts.session
            session.parent = facts.parent
            self._by_name[facts.session] = session
            self._keep_parent(session, now)
        session.stays = blocks[0] in self.habits.returning
        self._by_tail[tail] = session
        stays = session.stays and has_place
        if session.endpoint is not None and not (stays and session.endpoint == endpoint):
            self.sets[session.endpoint].leave(session)
        if stays:
            residents = self.sets.get(endpoint)
            if residents is None:
                residents = self.sets[endpoint] = ResidentSet()
            residents.enter(session, endpoint, blocks, facts.prompt_tokens)
            if residents.capacity_tokens:
                self._make_room(residents)
        session.tail = tail
        session.blocks = len(blocks)
        session.tokens = facts.prompt_tokens
        return session

    def turn_ended(self, session: Session, now: float, *, goes_on: bool) -> None:
        """Keep the session's room until its next turn, or give it up."""
        session.running = False
        session.ended_at = now
        if session.parent:
            self._keep_parent(session, now)
        if session.endpoint is not None:
            self.sets[session.endpoint].running_tokens -= session.tokens
        if not goes_on:
            self._forget(session)
            return
        if session.endpoint is not None and not session.calls_tool and self.habits.ends_without_call(session.head):
            self.sets[session.endpoint].leave(session)
        self._ended_last(session)
        if len(self._known) > MAX_SESSIONS:
            self._forget(next(iter(self._known)))

    def wait(self, request: PickRequest, now: float) -> SessionWait:
        """As of Admission."""
        session = self._find(request.facts) if request.facts.blocks else None
        tokens = request.facts.prompt_tokens + max(self.habits.growth_tokens, request.output_tokens)
        wait = SessionWait(self, request, session, tokens, now)
        if request.waits_for_room:
            if not self.waits:
                self._admitted.clear()
                self._admitted.append((now, 0.0))
            self.waits[wait] = None
        if session is not None:  # its client has come back: it is neither forgotten meanwhile nor idle
            self._known.pop(session, None)
            self._idle.pop(session, None)
        return wait

    def has_room(self, wait: SessionWait, candidates: Sequence[Candidate], now: float) -> bool:
        """Return whether an endpoint has room for the one that waits. If none has, the one that will first have it is
        kept for it, unless another one waits for room among these: what gets free elsewhere is the first one's too."""
        self.expire(now)
        self._release_passed(wait)
        request = wait.request
        session = wait.session
        least: tuple[float, Candidate] | None = None
        if request.excluded:
            candidates = _allowed(request, candidates)
        if any(_kept_elsewhere(one.load, wait.began_at) for one in candidates):
            self._release(wait)
            return False
        for one in candidates:
            if self._is_kept(one, wait):
                continue
            missing = self._missing_tokens(one, session, request, holder=wait)
            if missing <= 0.0:
                self._admitted.append((now, wait.tokens))
                self._release(wait)
                return True
            if least is None or missing < least[0]:
                least = missing, one
        if wait.reserved is not None and all(one.id != wait.reserved for one in candidates):
            self._release(wait)  # that endpoint is not to be chosen at present
        if least is not None and not any(one.id in self._reserved for one in candidates):
            load = cast("EndpointLoad", least[1].load)
            self._reserved[least[1].id] = wait, load
            wait.reserved = least[1].id
            load.keep_room(wait.began_at)
        return False

    def wait_over(self, wait: SessionWait, now: float) -> None:
        """Forget one that waits no longer."""
        if wait.is_over:
            return
        wait.is_over = True
        if wait in self.waits:
            del self.waits[wait]
            self._release(wait)
            self._granted = wait.request.facts.blocks[-1], now - wait.began_at
        session = wait.session
        if session is not None and not session.running:
            # its wait is no part of the gap between its turns; several may have waited that continue it
            session.ended_at = min(now, session.ended_at + now - wait.began_at)
            self._ended_last(session)

    def retry_after_s(self, request: PickRequest, max_wait_s: float, now: float) -> float | None:
        """As of Admission."""
        if self._find(request.facts) is not None:
            return None
        wait_s = self.expected_wait_s(now)
        if max_wait_s > 0.0 and (wait_s is None or wait_s <= max_wait_s):
            return None
        return max(1.0, (wait_s or 0.0) - max_wait_s)

    def expected_wait_s(self, now: float) -> float | None:
        """Seconds until a session that comes now has room, by the rate of late; None: not known."""
        admitted = self._admitted
        if len(admitted) <= _RATE_KNOWN:
            return None
        took_s = max(0.001, now - admitted[0][0])
        return sum(wait.tokens for wait in self.waits) * took_s / sum(tokens for _, tokens in admitted)

    def next_change_at(self, now: float) -> float:
        """As of Admission."""
        first = next(iter(self._idle), None)
        return now + HORIZON_S if first is None else first.ended_at + self.habits.idle_limit_s

    def forget(self, endpoint: EndpointId) -> None:
        """As of Admission."""
        self.kept_elsewhere.discard(endpoint)
        residents = self.sets.pop(endpoint, None)
        for session in [] if residents is None else list(residents.sessions):
            assert residents is not None
            residents.leave(session)
            self._idle.pop(session, None)
        if endpoint in self._reserved:
            self._release(self._reserved[endpoint][0])

    def expire(self, now: float) -> None:
        """Take the room of residents that were idle for too long, and forget sessions that will not come back."""
        limit_s = self.habits.idle_limit_s
        while (first := next(iter(self._idle), None)) is not None and now - first.ended_at > limit_s:
            del self._idle[first]
            if first.endpoint is not None:
                self.sets[first.endpoint].leave(first)
        while (first := next(iter(self._known), None)) is not None and now - first.ended_at > HORIZON_S:
            if not (self._shares and (self.waits or self.kept_elsewhere)):  # else it may wait at another router
                self.habits.note_last(first.head, calls_tool=first.calls_tool)
            self._forget(first)

    def _release_passed(self, wait: SessionWait) -> None:
        """Keep no room any more for those that were not asked while this one was twice: another went ahead of them."""
        before, last = wait.asked
        self._asked += 1
        wait.asked = last, self._asked
        for holder, _ in list(self._reserved.values()):
            if holder.asked[1] < before:
                self._release(holder)

    def _release(self, wait: SessionWait) -> None:
        if wait.reserved is not None:
            _, load = self._reserved.pop(wait.reserved)
            load.keep_room(None)
            wait.reserved = None

    def _is_kept(self, one: Candidate, wait: SessionWait | None) -> bool:
        """Return whether the room of an endpoint is kept for another one than this, here or by another router."""
        holder = self._reserved.get(one.id)
        if holder is not None and holder[0] is not wait:
            return True
        return wait is None and _kept_elsewhere(one.load, math.inf)

    def _keep_parent(self, session: Session, now: float) -> None:
        """Expect the parent of a session only after the session's own turns."""
        parent = self._by_name.get(session.parent)
        if parent is not None and not parent.running and parent in self._known:
            parent.ended_at = now
            self._ended_last(parent)

    def _ended_last(self, session: Session) -> None:
        """Put a session between turns behind those that ended before."""
        self._known.pop(session, None)
        self._known[session] = None
        self._idle.pop(session, None)
        if session.endpoint is not None:
            self._idle[session] = None

    def _find(self, facts: OverlapFacts) -> Session | None:
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
                return None
        # of a turn elsewhere the end is reported late: its client has the answer
        return None if found is None or (found.running and not found.elsewhere) else found

    def _missing_tokens(
        self, one: Candidate, session: Session | None, request: PickRequest, *, holder: SessionWait | None = None
    ) -> float:
        """Return the tokens by which an endpoint's room falls short of a session; 0 or less: it has room."""
        load = cast("EndpointLoad", one.load)
        engine = load.engine
        residents = self.sets.get(one.id)
        if engine is None or not engine.capacity_tokens or residents is None or not residents.sessions:
            return 0.0
        residents.capacity_tokens = engine.capacity_tokens
        if session is not None and session.endpoint == one.id:
            return 0.0
        limit, _ = self.find_limits(engine.capacity_tokens)
        if limit == math.inf:
            return 0.0
        if (self._reserved or load.remote_load is not None) and self._is_kept(one, holder):
            return engine.capacity_tokens
        tokens = request.facts.prompt_tokens
        single_tokens = max(0, load.resident_tokens - residents.running_tokens)
        taken = residents.tokens(self.habits.growth_tokens) + single_tokens
        missing = taken + tokens + max(self.habits.growth_tokens, request.output_tokens) - limit
        if missing <= 0.0:
            return missing
        return missing - residents.count_shared(cast("array[int]", request.facts.blocks)) * tokens

    def _return(self, session: Session, tokens: int, now: float) -> None:
        if session.running:
            self.turn_ended(session, now, goes_on=True)
        gap_s = now - session.ended_at
        grown = tokens - session.tokens
        self.habits.note_return(session.head, gap_s, session.tokens, grown, calls_tool=session.calls_tool)
        session.calls_tool = True
        session.turns += 1
        session.running = True
        self._idle.pop(session, None)
        self._known.pop(session, None)
        if self._by_tail.get(session.tail) is session:
            del self._by_tail[session.tail]

    def _make_room(self, residents: ResidentSet) -> None:
        """Have the youngest sessions between turns give way, where contexts have outgrown the memory."""
        _, limit = self.find_limits(residents.capacity_tokens)
        while residents.tokens(self.habits.growth_tokens) > limit:
            youngest = residents.youngest_idle()
            if youngest is None:
                return
            self.given_way += 1
            self._on_give_way()
            self._idle.pop(youngest, None)
            residents.leave(youngest)

    def _forget(self, session: Session) -> None:
        self._known.pop(session, None)
        self._idle.pop(session, None)
        if session.endpoint is not None:
            self.sets[session.endpoint].leave(session)
        if self._by_tail.get(session.tail) is session:
            del self._by_tail[session.tail]
        if self._by_name.get(session.name) is session:
            del self._by_name[session.name]


def _allowed(request: PickRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the endpoints that the request may go to."""
    return [one for one in candidates if one.id not in request.excluded]


def _kept_elsewhere(load: object, since: float) -> bool:
    """Return whether another router keeps the room of an endpoint for a session that came before `since`."""
    others = cast("EndpointLoad", load).remote_load
    return others is not None and others.kept_since < since
