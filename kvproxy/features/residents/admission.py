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
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Candidate, OverlapFacts, PickRequest
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.features.residents.habits import HORIZON_S, Habits
from kvproxy.features.residents.known_sessions import KnownSessions
from kvproxy.features.residents.note import NOTE, SessionTurn
from kvproxy.features.residents.resident_set import ResidentSet, Session
from kvproxy.features.residents.waiting_line import Waiting, WaitingLine, is_kept_elsewhere

#: Share of an engine's memory up to which sessions are admitted, and at which the youngest gives way.
ADMIT_BELOW = 0.9
GIVE_WAY_AT = 0.98
#: Share of the sessions' pauses in which an engine computes contexts again before one gives way.
RECOMPUTED = 0.25
#: Bound on the sessions that are known; the longest idle are forgotten first.
MAX_SESSIONS = 65_536


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


class SessionWait(Waiting, eq=False, kw_only=True):
    """A turn of a session that waits for room, or for its turn in the queue alone."""

    admission: SessionAdmission
    session: Session | None  # None: it begins
    is_over: bool = False

    def has_room(self, candidates: Sequence[Candidate], now: float) -> bool:
        """As of RoomWait."""
        return self.admission.has_room(self, candidates, now)

    def over(self, now: float) -> None:
        """As of RoomWait."""
        if self.is_over:
            return
        self.is_over = True
        self.admission.line.leave(self, now)
        session = self.session
        if session is not None and not session.running:
            # its wait is no part of the gap between its turns; several may have waited that continue it
            session.ended_at = min(now, session.ended_at + now - self.began_at)
            self.admission.known.pause(session)


class SessionAdmission:
    """The rule of one cluster."""

    def __init__(self, *, on_give_way: Callable[[], None] = lambda: None) -> None:
        self.habits = Habits()
        self.speeds: SpeedModel | None = None
        self._on_give_way = on_give_way
        self.known = KnownSessions()
        self.line = WaitingLine()
        self.sets: dict[EndpointId, ResidentSet] = {}
        self.given_way = 0  # residents so far whose room was needed by others
        self.kept_elsewhere = set[EndpointId]()
        self._turns_elsewhere: dict[Hashable, tuple[Session, int]] = {}  # and which turns of their sessions they are
        self._shares = False  # whether another router places requests as well

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
        session = self.known.find(request.facts)
        if blocks[0] not in self.habits.returning:
            return request
        if not (self.line.waits or self.kept_elsewhere):
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
        asked, session = self.known.found
        if asked is not blocks or (session is not None and session.running):
            session = self.known.find(facts)
        # one that waited for too long passes without a place
        session = self._begin_turn(session, facts, endpoint, now, elsewhere=False, has_place=not request.waits_for_room)
        waited_s = self.line.waited_s(blocks)
        note = None
        if session.stays or waited_s:
            note = NOTE, SessionTurn(session.turns, session.home is not None, round(waited_s, 3))
        return SessionStay(self, session, note)

    def placed_elsewhere(self, turn: Hashable, facts: OverlapFacts, endpoint: EndpointId, now: float) -> None:
        """As of Admission."""
        blocks = facts.blocks
        if not blocks:
            return
        self.expire(now)
        session = self._begin_turn(self.known.find(facts), facts, endpoint, now, elsewhere=True, has_place=True)
        self._turns_elsewhere[turn] = session, session.turns
        self._shares = True

    def ended_elsewhere(self, turn: Hashable, now: float, *, served: bool, calls_tool: bool) -> None:
        """As of Admission."""
        session, number = self._turns_elsewhere.pop(turn, (None, 0))
        if session is not None and session.turns == number:  # else its next turn has come here already
            session.calls_tool = calls_tool
            self.turn_ended(session, now, goes_on=served)

    def _begin_turn(
        self,
        session: Session | None,
        facts: OverlapFacts,
        endpoint: EndpointId,
        now: float,
        *,
        elsewhere: bool,
        has_place: bool,
    ) -> Session:
        """Count the next turn of a session (None: its first)."""
        blocks = cast("array[int]", facts.blocks)
        if session is None:
            session = Session(blocks[-1], blocks[0], len(blocks), facts.prompt_tokens, now)
        else:
            if session.running:
                self.turn_ended(session, now, goes_on=True)
            grown = facts.prompt_tokens - session.tokens
            gap_s = None if elsewhere else now - session.ended_at
            self.habits.note_return(session.head, gap_s, session.tokens, grown, calls_tool=session.calls_tool)
            session.calls_tool = True
            session.turns += 1
            session.running = True
        session.elsewhere = elsewhere
        self.known.enter(session, facts, now)
        session.stays = blocks[0] in self.habits.returning
        stays = session.stays and has_place
        if session.home is not None and not (stays and session.home.endpoint == endpoint):
            session.leave()
        if stays:
            residents = self.sets.get(endpoint)
            if residents is None:
                residents = self.sets[endpoint] = ResidentSet(endpoint)
            residents.enter(session, blocks, facts.prompt_tokens)
            if residents.tokens(self.habits.growth_tokens) > GIVE_WAY_AT * residents.capacity_tokens > 0.0:
                _, limit = self.find_limits(residents.capacity_tokens)
                for youngest in residents.shrink(limit, self.habits.growth_tokens):
                    self.known.idle.pop(youngest, None)
                    self.given_way += 1
                    self._on_give_way()
        session.tail = blocks[-1]
        session.blocks = len(blocks)
        session.tokens = facts.prompt_tokens
        return session

    def turn_ended(self, session: Session, now: float, *, goes_on: bool) -> None:
        """Keep the session's room until its next turn, or give it up."""
        session.running = False
        session.ended_at = now
        if session.parent:
            self.known.await_child(session, now)
        if session.home is not None:
            session.home.running_tokens -= session.tokens
        if not goes_on:
            self.known.forget(session)
            return
        if not session.calls_tool and self.habits.ends_without_call(session.head):
            session.leave()
        self.known.pause(session)
        if len(self.known.paused) > MAX_SESSIONS:
            self.known.forget(next(iter(self.known.paused)))

    def wait(self, request: PickRequest, now: float) -> SessionWait:
        """As of Admission."""
        session = self.known.find(request.facts) if request.facts.blocks else None
        tokens = request.facts.prompt_tokens + max(self.habits.growth_tokens, request.output_tokens)
        wait = SessionWait(
            request=request, tokens=tokens, began_at=now, begins=session is None, admission=self, session=session
        )
        if request.waits_for_room:
            self.line.join(wait)
        if session is not None:  # its client has come back: it is neither forgotten meanwhile nor idle
            self.known.resume(session)
        return wait

    def has_room(self, wait: SessionWait, candidates: Sequence[Candidate], now: float) -> bool:
        """Return whether an endpoint has room for the one that waits. If none has, the one that will first have it is
        kept for it."""
        self.expire(now)
        self.line.ask(wait)
        request = wait.request
        best: Candidate | None = None
        least = math.inf
        if request.excluded:
            candidates = _allowed(request, candidates)
        if any(is_kept_elsewhere(one, wait.began_at) for one in candidates):
            self.line.release(wait)
            return False
        for one in candidates:
            if self.line.is_kept(one, wait):
                continue
            missing = self._missing_tokens(one, wait.session, request, holder=wait)
            if missing <= 0.0:
                self.line.admit(wait, now)
                return True
            if missing < least:
                best = one
                least = missing
        self.line.keep(wait, best, candidates)
        return False

    def retry_after_s(self, request: PickRequest, max_wait_s: float, now: float) -> float | None:
        """As of Admission."""
        if self.known.find(request.facts) is not None:
            return None
        wait_s = self.line.expected_wait_s(now)
        if max_wait_s > 0.0 and (wait_s <= max_wait_s or not self.line.knows_rate):
            return None
        return max(1.0, wait_s - max_wait_s)

    def next_change_at(self, now: float) -> float:
        """As of Admission."""
        first = next(iter(self.known.idle), None)
        return now + HORIZON_S if first is None else first.ended_at + self.habits.idle_limit_s

    def forget(self, endpoint: EndpointId) -> None:
        """As of Admission."""
        self.kept_elsewhere.discard(endpoint)
        residents = self.sets.pop(endpoint, None)
        for session in () if residents is None else tuple(residents.sessions):
            session.leave()
            self.known.idle.pop(session, None)
        if endpoint in self.line.kept:
            self.line.release(self.line.kept[endpoint][0])

    def expire(self, now: float) -> None:
        """Take the room of residents that were idle for too long, and forget sessions that will not come back."""
        known = self.known
        limit_s = self.habits.idle_limit_s
        while (first := next(iter(known.idle), None)) is not None and now - first.ended_at > limit_s:
            del known.idle[first]
            first.leave()
        while (first := next(iter(known.paused), None)) is not None and now - first.ended_at > HORIZON_S:
            if not (self._shares and (self.line.waits or self.kept_elsewhere)):  # else it may wait at another router
                self.habits.note_last(first.head, calls_tool=first.calls_tool)
            known.forget(first)

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
        if session is not None and session.home is residents:
            return 0.0
        limit, _ = self.find_limits(engine.capacity_tokens)
        if limit == math.inf:
            return 0.0
        if (self.line.kept or load.remote_load is not None) and self.line.is_kept(one, holder):
            return engine.capacity_tokens
        tokens = request.facts.prompt_tokens
        single_tokens = max(0, load.resident_tokens - residents.running_tokens)
        taken = residents.tokens(self.habits.growth_tokens) + single_tokens
        missing = taken + tokens + max(self.habits.growth_tokens, request.output_tokens) - limit
        if missing <= 0.0:
            return missing
        return missing - residents.count_shared(cast("array[int]", request.facts.blocks)) * tokens


def _allowed(request: PickRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the endpoints that the request may go to."""
    return [one for one in candidates if one.id not in request.excluded]
