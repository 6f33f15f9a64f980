"""The rule by which sessions begin: residents of engines, room, waits, and what ends them."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec
import pytest

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.routing.fair_queue import FairQueue
from kvproxy.cluster.routing.load import EndpointLoad, EngineState, row_of
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.remote_load import RemoteLoad
from kvproxy.cluster.routing.speeds import SpeedModel, SpeedPriors
from kvproxy.features.residents import admission as rule
from kvproxy.features.residents.admission import SessionAdmission, SessionStay, SessionWait
from kvproxy.features.residents.habits import HORIZON_S, MAX_HEADS, Habits
from kvproxy.features.residents.note import NOTE, SessionTurn

CAPACITY = 100_000
BLOCK = 100  # tokens


@dataclass
class Engine:
    """A candidate with this much memory."""

    id: EndpointId
    capacity_tokens: int | None = CAPACITY
    weight: float = 1.0
    load: EndpointLoad = field(default_factory=EndpointLoad)

    def __post_init__(self) -> None:
        if self.capacity_tokens is not None:
            self.load.engine = EngineState(0.0, self.capacity_tokens)


A = Engine(EndpointId("a"))
B = Engine(EndpointId("b"))


def prompt(session: int, blocks: int, *, shared: int = 0) -> PickRequest:
    """Return the question for a prompt of this session; its first `shared` blocks are those of all."""
    common = min(shared, blocks)
    hashes = array("Q", [*range(1, common + 1), *(1_000_000 * session + index for index in range(common, blocks))])
    return PickRequest(facts=OverlapFacts(blocks * BLOCK, blocks=hashes, block_tokens=BLOCK))


def knows(admission: SessionAdmission, *sessions: int, shared: int = 0) -> None:
    """Teach it that prompts which begin like those of these sessions come back."""
    for session in sessions:
        admission.habits.note_return(prompt(session, 2, shared=shared).facts.blocks[0], 0.5, 1, 0)


def begin(admission: SessionAdmission, request: PickRequest, at: Engine, now: float = 0.0) -> SessionStay:
    """Place a request there."""
    stay = admission.place(request, at.id, now)
    assert stay is not None
    return stay


def turn(admission: SessionAdmission, request: PickRequest, at: Engine, now: float = 0.0) -> None:
    """Place a request and end it."""
    begin(admission, request, at, now).end(now, served=True)


def waits(admission: SessionAdmission, request: PickRequest, *candidates: Engine, now: float = 0.0) -> bool:
    """Return whether the request would have to wait."""
    return admission.restrict(request, candidates, now).waits_for_room


def wait_for_room(admission: SessionAdmission, request: PickRequest, now: float) -> SessionWait:
    """Queue a request for room."""
    return admission.wait(msgspec.structs.replace(request, waits_for_room=True), now)


@pytest.fixture
def admission() -> SessionAdmission:
    """Return a rule that takes contexts as they are, without room for growth."""
    made = SessionAdmission()
    made.habits.growth_tokens = 0.0
    return made


def test_a_session_begins_only_where_its_whole_context_has_room(admission: SessionAdmission) -> None:
    """Beside the residents, below 0.9 of the memory."""
    knows(admission, 1, 2, 3)
    turn(admission, prompt(1, 500), A)
    assert not waits(admission, prompt(2, 400), A)
    assert waits(admission, prompt(2, 401), A)
    assert not waits(admission, prompt(2, 401), A, B)


def test_a_long_answer_that_is_expected_needs_its_room(admission: SessionAdmission) -> None:
    """A short one as much as turns usually add."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 500), A)
    admission.habits.growth_tokens = 1_000.0  # of each: 400 blocks less 20
    for tokens, room in ((0, True), (900, True), (2_000, False)):
        asked = msgspec.structs.replace(prompt(2, 380), output_tokens=tokens)
        assert waits(admission, asked, A) is not room
    assert wait_for_room(admission, asked, 0.0).tokens == 40_000


def test_turns_of_residents_never_wait(admission: SessionAdmission) -> None:
    """Whatever their contexts have grown to."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 500), A)
    turn(admission, prompt(2, 400), A)
    assert waits(admission, prompt(3, 100), A) is False  # nothing is known of its kind
    assert not waits(admission, prompt(1, 700), A)


def test_sessions_do_not_wait_where_memory_saves_less_than_they_pause(admission: SessionAdmission) -> None:
    """To compute all that it holds once a pause would not fill an engine's time. Those that wait already go."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 500), A)
    asked = prompt(2, 401)
    admission.speeds = SpeedModel(SpeedPriors(tokens_per_s=10_000.0))  # the memory holds 10 s of prefill
    admission.habits.pause_s = 9.9
    assert waits(admission, asked, A)
    room = wait_for_room(admission, asked, 0.0)
    assert not room.has_room([A], 0.0)
    assert A.load.kept_since is not None
    admission.habits.pause_s = 10.1
    assert not waits(admission, asked, A)
    assert room.has_room([A], 0.0)
    assert A.load.kept_since is None


def test_none_gives_way_to_what_is_computed_again_within_pauses(admission: SessionAdmission) -> None:
    """A quarter of them is enough for contexts that outgrow the memory."""
    knows(admission, 1, 2, 3, 4)
    admission.speeds = SpeedModel(SpeedPriors(tokens_per_s=10_000.0))
    admission.habits.pause_s = 4.0  # 10,000 tokens in a quarter
    turn(admission, prompt(1, 400), A)
    assert not waits(admission, prompt(2, 480), A)
    turn(admission, prompt(2, 480), A)
    turn(admission, prompt(3, 200), A)
    assert not admission.given_way
    turn(admission, prompt(4, 1), A)
    assert admission.given_way == 1


def test_an_answer_without_a_tool_call_gives_up_room_where_sessions_end_so(admission: SessionAdmission) -> None:
    """As learned for each beginning; one that goes on all the same is still the session that it was."""
    head = prompt(1, 1).facts.blocks[0]
    last = begin(admission, prompt(1, 10), A)
    last.calls_tool = False
    last.end(0.0, served=True)
    assert not admission.habits.ends_without_call(head)  # not before one has ended so
    admission.expire(HORIZON_S + 1.0)
    assert admission.habits.ends_without_call(head)
    knows(admission, 1, 1, 1, 2)
    turn(admission, prompt(1, 800), A)
    assert len(admission.sets[A.id].sessions) == 1
    last = begin(admission, prompt(1, 810), A)
    last.calls_tool = False
    assert waits(admission, prompt(2, 200), A)
    last.end(0.0, served=True)
    assert not waits(admission, prompt(2, 200), A)
    assert len(admission.sets[A.id].sessions) == 0
    turn(admission, prompt(1, 820), A)
    assert [(one.turns, one.calls_tool) for one in admission.sets[A.id].sessions] == [(3, True)]
    admission.habits.note_return(head, 0.5, 1, 0, calls_tool=False)
    assert not admission.habits.ends_without_call(head)  # more went on than ended


def test_prefixes_shared_by_sessions_count_once(admission: SessionAdmission) -> None:
    """By the blocks that a resident has already."""
    knows(admission, 1, shared=400)
    turn(admission, prompt(1, 500, shared=400), A)
    assert not waits(admission, prompt(2, 800, shared=400), A)
    assert waits(admission, prompt(2, 801, shared=400), A)


def test_single_requests_never_wait_and_count_as_long_as_they_run(admission: SessionAdmission) -> None:
    """Prompts of whose kind most did not come back; what runs of residents counts once."""
    engine = Engine(EndpointId("e"))
    knows(admission, 1, 2)
    engine.load.reserve(500 * BLOCK, 0, 0.0)
    running = begin(admission, prompt(1, 500), engine)
    assert not waits(admission, prompt(9, 500), engine)
    assert not waits(admission, prompt(2, 400), engine)
    single = engine.load.reserve(100 * BLOCK, 0, 0.0)
    assert len(admission.sets[engine.id].sessions) == 1
    assert waits(admission, prompt(2, 400), engine)
    engine.load.release(single, 0.0)
    assert not waits(admission, prompt(2, 400), engine)
    running.end(0.0, served=True)
    assert admission.sets[engine.id].running_tokens == 0


def test_beginnings_are_learned_from_what_came_back() -> None:
    """A second turn within the horizon counts for it, its absence against it."""
    admission = SessionAdmission()
    admission.habits.growth_tokens = 0.0
    head = prompt(1, 1).facts.blocks[0]
    turn(admission, prompt(1, 10), A, now=0.0)
    assert head not in admission.habits.returning
    turn(admission, prompt(1, 20), A, now=1.0)
    assert head in admission.habits.returning
    lonely = prompt(2, 1).facts.blocks[0]
    turn(admission, prompt(2, 10), A, now=1.0)
    admission.expire(2.0 + HORIZON_S)
    assert lonely not in admission.habits.returning
    assert len(admission.known) == 0


def test_one_who_writes_twice_within_the_horizon_is_no_session_yet() -> None:
    """Every turn counts, so that people who sometimes answer at once do not wait for room."""
    admission = SessionAdmission()
    head = prompt(1, 1).facts.blocks[0]
    turn(admission, prompt(1, 10), A, now=0.0)
    turn(admission, prompt(1, 20), A, now=HORIZON_S - 1.0)
    assert head in admission.habits.returning
    admission.expire(2.0 * HORIZON_S)
    assert head not in admission.habits.returning


def test_the_same_prompt_again_is_no_turn() -> None:
    """Its session's next one would contain the answer; a document that many ask about has no sessions."""
    admission = SessionAdmission()
    turn(admission, prompt(1, 10), A, now=0.0)
    turn(admission, prompt(1, 10), A, now=1.0)
    assert prompt(1, 1).facts.blocks[0] not in admission.habits.returning
    turn(admission, prompt(1, 11), A, now=2.0)
    assert prompt(1, 1).facts.blocks[0] in admission.habits.returning


def test_idle_sessions_give_up_their_room(admission: SessionAdmission) -> None:
    """After the learned limit, and are told apart from those that still come back in time."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 800), A, now=0.0)
    assert admission.next_change_at(0.0) == admission.habits.idle_limit_s
    assert waits(admission, prompt(2, 200), A, now=admission.habits.idle_limit_s)
    assert not waits(admission, prompt(2, 200), A, now=admission.habits.idle_limit_s + 0.1)


def test_a_client_that_left_gives_up_its_room_at_once(admission: SessionAdmission) -> None:
    """So does an answer that failed."""
    knows(admission, 1, 2)
    begin(admission, prompt(1, 800), A).end(0.0, served=False)
    assert not waits(admission, prompt(2, 800), A)
    assert len(admission.known) == 0


def test_a_session_that_its_client_ends_gives_up_its_room_with_its_answer(admission: SessionAdmission) -> None:
    """By the header or field that names its last request."""
    knows(admission, 1, 2)
    last = begin(admission, prompt(1, 800), A)
    last.last = True
    assert waits(admission, prompt(2, 200), A)
    last.end(0.0, served=True)
    assert not waits(admission, prompt(2, 200), A)
    assert len(admission.known) == 0


def test_the_youngest_between_turns_gives_way_to_growth(admission: SessionAdmission) -> None:
    """Its next turn waits for room like a new session's."""
    knows(admission, 1, 2, 3)
    waits(admission, prompt(1, 300), A)
    turn(admission, prompt(1, 300), A, now=0.0)
    waits(admission, prompt(2, 300), A)
    turn(admission, prompt(2, 300), A, now=1.0)
    turn(admission, prompt(3, 250), A, now=2.0)
    begin(admission, prompt(1, 500), A, now=3.0)
    assert admission.given_way == 1
    assert not waits(admission, prompt(2, 301), A, now=3.0)
    assert waits(admission, prompt(3, 251), A, now=3.0)


def test_the_first_that_waits_keeps_the_room_that_comes_first(admission: SessionAdmission) -> None:
    """Smaller ones do not pass it there, and it begins once the room is enough."""
    knows(admission, 1, 2, 3, 4)
    first = begin(admission, prompt(1, 600), A)
    turn(admission, prompt(2, 200), A)
    assert waits(admission, prompt(3, 500), A)
    large = wait_for_room(admission, prompt(3, 500), 0.0)
    assert not large.has_room([A], 0.0)
    assert waits(admission, prompt(4, 50), A)
    small = wait_for_room(admission, prompt(4, 50), 0.0)
    assert not small.has_room([A], 0.0)
    first.end(0.0, served=False)
    assert not small.has_room([A], 0.0)
    assert large.has_room([A], 0.0)
    assert not waits(admission, prompt(3, 500), A)
    large.over(0.0)
    large.over(0.0)
    assert list(admission.line.waits) == [small]


def test_room_is_kept_where_the_session_may_go(admission: SessionAdmission) -> None:
    """Another endpoint keeps it once the first is not to be chosen."""
    knows(admission, 1, 2, 3)
    turn(admission, prompt(1, 600), A)
    turn(admission, prompt(2, 700), B)
    wait = wait_for_room(admission, prompt(3, 500), 0.0)
    assert not wait.has_room([A, B], 0.0)
    assert wait.reserved == A.id
    assert not wait.has_room([B], 0.0)
    assert wait.reserved == B.id


def test_one_that_left_the_queue_keeps_no_room(admission: SessionAdmission) -> None:
    """The next one has it."""
    knows(admission, 1, 2, 3)
    turn(admission, prompt(1, 600), A)
    large = wait_for_room(admission, prompt(2, 500), 0.0)
    assert not large.has_room([A], 0.0)
    small = wait_for_room(admission, prompt(3, 100), 0.0)
    assert not small.has_room([A], 0.0)
    large.over(0.0)
    assert small.has_room([A], 0.0)


def test_while_one_waits_others_go_only_where_they_have_room(admission: SessionAdmission) -> None:
    """Before that the policy chooses among all endpoints."""
    knows(admission, 1, 2, 3)
    turn(admission, prompt(1, 800), A)
    assert admission.restrict(prompt(3, 200), [A, B], 0.0) == prompt(3, 200)
    wait_for_room(admission, prompt(2, 900), 0.0)
    assert admission.restrict(prompt(3, 200), [A, B], 0.0).excluded == {A.id}
    assert admission.restrict(prompt(3, 100), [A, B], 0.0) == prompt(3, 100)


def test_endpoints_that_a_request_may_not_use_have_no_room_for_it(admission: SessionAdmission) -> None:
    """Neither at its arrival nor while it waits; where none is left there is nothing to wait for."""
    knows(admission, 1, 2, 3)
    turn(admission, prompt(1, 800), A)
    barred = msgspec.structs.replace(prompt(2, 200), excluded=frozenset({B.id}))
    asked = admission.restrict(barred, [A, B], 0.0)
    assert asked.waits_for_room
    wait = wait_for_room(admission, asked, 0.0)
    assert not wait.has_room([A, B], 0.0)
    assert wait.reserved == A.id
    barred = msgspec.structs.replace(prompt(3, 200), excluded=frozenset({B.id}))
    third = Engine(EndpointId("c"))
    assert admission.restrict(barred, [A, B, third], 0.0).excluded == {A.id, B.id}
    assert not waits(admission, barred, B)


def test_a_session_that_moves_takes_its_context_along(admission: SessionAdmission) -> None:
    """The engine that it left has its room back."""
    knows(admission, 1)
    turn(admission, prompt(1, 500), A)
    turn(admission, prompt(1, 600), B)
    assert not admission.sets[A.id].sessions
    assert admission.sets[B.id].tokens(0.0) == pytest.approx(600 * BLOCK)


def test_a_fork_is_a_session_of_its_own(admission: SessionAdmission) -> None:
    """It continues a prompt whose answer is still running, and shares that context."""
    knows(admission, 1)
    begin(admission, prompt(1, 300), A)
    child = prompt(1, 300).facts.blocks + array("Q", [77, 78])
    begin(admission, PickRequest(facts=OverlapFacts(302 * BLOCK, blocks=child)), A)
    assert len(admission.sets[A.id].sessions) == 2
    assert admission.sets[A.id].tokens(0.0) == pytest.approx(302 * BLOCK)


def test_contexts_that_shrink_and_branch_leave_nothing_behind(admission: SessionAdmission) -> None:
    """A rewritten context counts as it is now, and an empty set has no tokens."""
    knows(admission, 1, shared=10)
    turn(admission, prompt(1, 50, shared=10), A)
    turn(admission, prompt(2, 60, shared=20), A)
    turn(admission, prompt(1, 70, shared=10), A)
    assert admission.sets[A.id].tokens(0.0) == pytest.approx((70 + 50) * BLOCK)
    admission.forget(A.id)
    assert A.id not in admission.sets
    turn(admission, prompt(1, 80, shared=10), A)
    assert admission.sets[A.id].tokens(0.0) == pytest.approx(80 * BLOCK)
    admission.forget(A.id)
    admission.forget(A.id)


def test_an_engine_that_left_takes_its_residents_and_reservations_along(admission: SessionAdmission) -> None:
    """They wait for room elsewhere, and those that waited for its room look for another."""
    knows(admission, 1, 2, 3)
    running = begin(admission, prompt(1, 500), A)
    turn(admission, prompt(2, 600), B)
    large = wait_for_room(admission, prompt(3, 600), 0.0)
    assert not large.has_room([A], 0.0)
    assert large.reserved == A.id
    admission.forget(A.id)
    assert large.reserved is None
    assert not large.has_room([B], 0.0)
    running.end(1.0, served=True)
    assert waits(admission, prompt(1, 500), B, now=1.0)


@pytest.mark.parametrize("capacity", [None, 0], ids=["not reported", "none"])
def test_engines_of_unknown_memory_have_room(admission: SessionAdmission, capacity: int | None) -> None:
    """The rule has no effect there."""
    unknown = Engine(EndpointId("u"), capacity)
    knows(admission, 1, 2)
    turn(admission, prompt(1, 10_000), unknown)
    assert not waits(admission, prompt(2, 10_000), unknown)
    assert not admission.given_way


def test_a_session_larger_than_the_memory_begins_on_an_empty_engine(admission: SessionAdmission) -> None:
    """It would wait for ever."""
    knows(admission, 1, 2)
    assert not waits(admission, prompt(1, 2000), A)
    turn(admission, prompt(2, 10), A)
    assert waits(admission, prompt(1, 2000), A)


def test_lower_tiers_add_no_room(admission: SessionAdmission) -> None:
    """To load contexts again and again costs more than the wait."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 800), A)
    asked = prompt(2, 500)
    held = msgspec.structs.replace(asked.facts, by_endpoint={A.id: Overlap(0, ((Tier.HOST, 400),))})
    assert waits(admission, PickRequest(facts=held), A)


def test_prompts_without_blocks_are_not_counted(admission: SessionAdmission) -> None:
    """They are shorter than a block, or nothing is known of them."""
    assert admission.place(PickRequest(), A.id, 0.0) is None
    assert admission.restrict(PickRequest(), [A], 0.0) == PickRequest()
    assert admission.restrict(prompt(1, 5), [], 0.0) == prompt(1, 5)
    admission.wait(PickRequest(facts=OverlapFacts(0, session=5)), 0.0).over(1.0)


def test_a_turn_that_waited_for_too_long_takes_nobodys_room(admission: SessionAdmission) -> None:
    """It passes once, and its session is resident nowhere."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 800), A, now=0.0)
    turn(admission, prompt(2, 100), A, now=0.0)
    admission.forget(A.id)
    turn(admission, prompt(1, 850), A, now=1.0)
    late = admission.restrict(prompt(2, 150), [A], 1.0)
    assert late.waits_for_room
    begin(admission, late, A, now=1.0).end(2.0, served=True)
    assert len(admission.sets[A.id].sessions) == 1
    assert not admission.given_way
    assert admission.restrict(prompt(2, 200), [A], 2.0).waits_for_room


def test_a_resident_that_was_forced_elsewhere_leaves(admission: SessionAdmission) -> None:
    """Its turn had no room on any endpoint that may serve it."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 800), A)
    turn(admission, prompt(2, 800), B)
    late = admission.restrict(prompt(1, 850), [B], 0.0)
    assert late.waits_for_room
    turn(admission, late, B)
    assert not admission.sets[A.id].sessions


def test_waiting_is_no_part_of_the_gap_between_turns(admission: SessionAdmission) -> None:
    """And a session that waits is not forgotten."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 500), A, now=0.0)
    admission.forget(A.id)
    turn(admission, prompt(2, 800), A, now=0.0)
    wait = wait_for_room(admission, prompt(1, 510), 1.0)
    admission.expire(500.0)
    wait.over(500.0)
    turn(admission, prompt(1, 510), A, now=500.0)
    assert max(admission.habits._gaps)[0] == pytest.approx(1.0)


def test_a_session_whose_turn_waits_in_the_queue_is_not_idle(admission: SessionAdmission) -> None:
    """It keeps its room while engines are too busy for it, and is neither one of those that wait for room, nor is its
    wait part of the gap between its turns."""
    knows(admission, 1, 2)
    turn(admission, prompt(1, 500), A)
    wait = admission.wait(prompt(1, 510), 1.0)
    later_s = 3 * HORIZON_S
    assert waits(admission, prompt(2, 401), A, now=later_s)
    assert not admission.line.waits
    wait.over(later_s)
    wait.over(later_s + 1.0)  # its client's task ends later
    stay = begin(admission, prompt(1, 510), A, now=later_s)
    assert stay.note == (NOTE, SessionTurn(2, resident=True))
    assert max(admission.habits._gaps)[0] == pytest.approx(1.0)


def test_one_that_left_the_queue_is_idle_from_then_on(admission: SessionAdmission) -> None:
    """Its gap goes on, as if it had not come."""
    knows(admission, 1)
    turn(admission, prompt(1, 500), A)
    wait = admission.wait(prompt(1, 510), 1.0)
    wait.over(100.0)
    limit_s = admission.habits.idle_limit_s
    admission.expire(99.0 + limit_s)
    assert len(admission.sets[A.id].sessions) == 1
    admission.expire(99.1 + limit_s)
    assert not admission.sets[A.id].sessions


def test_new_sessions_are_refused_where_they_could_not_begin_in_time(admission: SessionAdmission) -> None:
    """By the rate at which room becomes free while some wait; sessions that have begun may always wait."""
    knows(admission, *range(1, 20))
    new = prompt(18, 100)
    assert admission.retry_after_s(new, 300.0, 0.0) is None
    assert admission.line.expected_wait_s(0.0) == 0.0
    assert admission.retry_after_s(new, 0.0, 0.0) == 1.0
    waiting = [wait_for_room(admission, prompt(number, 100), 1.0) for number in range(1, 16)]
    for number in range(10):
        assert admission.retry_after_s(new, 2.0, 1.0 + number) is None or number > 7
        assert waiting[number].has_room([A], 2.0 + number)
        waiting[number].over(2.0 + number)
    assert admission.line.expected_wait_s(11.0) == pytest.approx(5.0)
    assert admission.retry_after_s(new, 300.0, 11.0) is None
    assert admission.retry_after_s(new, 2.0, 11.0) == pytest.approx(3.0)
    turn(admission, prompt(17, 10), A, now=11.0)
    assert admission.retry_after_s(prompt(17, 20), 0.0, 11.0) is None


def test_the_rate_of_an_earlier_rush_is_that_of_the_next(admission: SessionAdmission) -> None:
    """An hour in which none waited is no hour for a few places."""
    rush = [wait_for_room(admission, prompt(number, 100), 0.0) for number in range(1, 20)]
    for wait in rush:
        assert wait.has_room([A], 1.0)
        wait.over(1.0)
    for number in range(20, 40):
        wait_for_room(admission, prompt(number, 100), 3600.0)
    assert admission.line.expected_wait_s(3600.0) == pytest.approx(20 / 19)
    assert admission.retry_after_s(prompt(50, 100), 300.0, 3600.0) is None


def test_before_the_rate_is_known_the_wait_of_the_first_is_expected(admission: SessionAdmission) -> None:
    """One that waited in vain is not asked to come again at once."""
    knows(admission, 1, 2)
    for number in (1, 2):
        wait_for_room(admission, prompt(number, 100), 5.0 * number)
    assert admission.line.expected_wait_s(65.0) == 60.0
    assert admission.retry_after_s(prompt(3, 100), 30.0, 65.0) is None  # it may be faster
    assert admission.retry_after_s(prompt(1, 100), 0.0, 65.0) == 60.0


def test_the_first_has_whatever_room_is_first_enough(admission: SessionAdmission) -> None:
    """Only one at a time has room kept: another tenant's, second in order, keeps none of the other engine's from it."""
    knows(admission, 1, 2, 3, 4)
    turn(admission, prompt(1, 800), A)
    second = begin(admission, prompt(2, 850), B)
    first = wait_for_room(admission, prompt(3, 300), 0.0)
    assert not first.has_room([A, B], 0.0)
    assert first.reserved == A.id
    other = wait_for_room(admission, prompt(4, 300), 0.0)
    assert not other.has_room([A, B], 0.0)
    assert other.reserved is None
    second.end(1.0, served=False)
    assert first.has_room([A, B], 1.0)
    first.over(1.0)
    begin(admission, prompt(3, 300), B, now=1.0)
    assert other.has_room([A, B], 1.0)


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_tenants_share_places_by_weight(admission: SessionAdmission, weight: float, share: float) -> None:
    """However many sessions of each wait, and whichever engine has room."""
    rng = Random(1)
    engines = [Engine(EndpointId(str(number))) for number in range(3)]
    knows(admission, *range(1000))
    running = [begin(admission, prompt(number, 400), engines[number % 3]) for number in range(6)]  # two on each engine
    queue: FairQueue[int] = FairQueue()
    tenants = {number: "a" if number % 5 else "b" for number in range(10, 400)}
    for number, tenant in tenants.items():
        asked = prompt(number, 400)
        assert waits(admission, asked, *engines)
        room = wait_for_room(admission, asked, 0.0)
        queue.offer(
            number,
            4.0,
            0.0,
            tenant=tenant,
            weight=weight if tenant == "a" else 1.0,
            has_room=lambda now, room=room: room.has_room(engines, now),  # type: ignore[misc]
        )
    rooms = {wait.request.facts.blocks[0] // 1_000_000: wait for wait in admission.line.waits}
    placed = []
    while len(placed) < 60:
        running.pop(rng.randrange(len(running))).end(0.0, served=False)
        while (ticket := queue.poll(lambda model: 0.0, 0.0)) is not None:
            asked = admission.restrict(prompt(ticket.item, 400), engines, 0.0)
            rooms[ticket.item].over(0.0)
            place = next(one for one in engines if admission._missing_tokens(one, None, asked) <= 0.0)
            running.append(begin(admission, asked, place))
            placed.append(tenants[ticket.item])
    assert placed.count("a") / len(placed) == pytest.approx(share, abs=0.03)


def test_room_goes_to_the_one_that_goes_ahead_of_its_first_holder(admission: SessionAdmission) -> None:
    """Of a later session with a higher priority; then to the one for which it was kept before."""
    knows(admission, *range(4))
    running = begin(admission, prompt(1, 800), A)
    queue: FairQueue[int] = FairQueue()
    for number, level in ((2, 0), (3, 10)):
        asked = prompt(number, 400)
        assert waits(admission, asked, A)
        room = wait_for_room(admission, asked, float(number))
        queue.offer(number, 4.0, float(number), level=level, has_room=partial(room.has_room, [A]))
        assert queue.poll(lambda model: 0.0, 5.0) is None
    assert A.load.kept_since == 2.0
    assert [queue.poll(lambda model: 0.0, 5.0) for _ in range(2)] == [None, None]
    assert A.load.kept_since == 3.0
    running.end(6.0, served=False)
    rooms = {wait.request.facts.blocks[0] // 1_000_000: wait for wait in admission.line.waits}
    for expected in (3, 2):
        ticket = queue.poll(lambda model: 0.0, 6.0)
        assert ticket is not None
        assert ticket.item == expected
        rooms[ticket.item].over(6.0)
    assert A.load.kept_since is None


def test_kept_entries_are_bounded(admission: SessionAdmission, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle sessions and the beginnings not seen for longest go first."""
    monkeypatch.setattr(rule, "MAX_SESSIONS", 3)
    for number in range(1, 6):
        turn(admission, prompt(number, 2), A)
    assert len(admission.known) == 3
    habits = Habits()
    for head in range(MAX_HEADS + 2):
        habits.note_return(head, 1.0, 1, 0)
    assert 0 not in habits.returning
    assert MAX_HEADS + 1 in habits.returning
    assert len(habits.returning) == MAX_HEADS


def test_habits_follow_the_traffic() -> None:
    """The idle limit covers 99 % of the gaps within its bounds, pause and growth are means of late, and old outcomes
    fade."""
    habits = Habits()
    for _ in range(300):
        habits.note_return(7, 25.0, 1, 1000)
    assert habits.idle_limit_s == habits.pause_s == 25.0
    assert habits.growth_tokens == pytest.approx(1000, rel=0.05)
    for _ in range(300):
        habits.note_return(7, 0.2, 1, 1000)
    assert habits.idle_limit_s == 2.0
    assert habits.pause_s == pytest.approx(0.2)
    for _ in range(128):
        habits.note_return(7, 20.0, 1, 1000)
        habits.note_return(8, 0.2, 98, 1000)
    assert habits.pause_s == pytest.approx(0.4)  # people who write little take little memory
    for _ in range(40):
        habits.note_last(7)
    assert 7 not in habits.returning


def named(request: PickRequest, session: int, parent: int = 0) -> PickRequest:
    """Return the request of a client that names its session."""
    return msgspec.structs.replace(
        request, facts=msgspec.structs.replace(request.facts, session=session, parent=parent)
    )


def test_a_session_that_its_client_names_goes_on_with_a_context_written_anew(admission: SessionAdmission) -> None:
    """It has its place. A request that begins otherwise is none of its turns, nor is one beside a running turn."""
    knows(admission, 1, shared=2)
    turn(admission, named(prompt(1, 800, shared=2), 11), A)
    anew = named(prompt(2, 300, shared=2), 11)
    assert not waits(admission, anew, A)
    running = begin(admission, anew, A)
    assert len(admission.known) == len(admission.sets[A.id].sessions) == 1
    assert admission.sets[A.id].tokens(0.0) == pytest.approx(300 * BLOCK)
    begin(admission, named(prompt(3, 20, shared=2), 11), A)
    assert len(admission.sets[A.id].sessions) == 2
    running.end(0.0, served=True)
    begin(admission, named(prompt(4, 20), 11), A)
    assert len(admission.known) == 3


def test_a_fork_that_its_client_names_is_a_session_of_its_own(admission: SessionAdmission) -> None:
    """Although its prompt continues that of another one between turns."""
    knows(admission, 1)
    turn(admission, named(prompt(1, 300), 11), A)
    turn(admission, named(prompt(1, 310), 12, parent=11), A)
    turn(admission, named(prompt(1, 320), 11), A)
    assert sorted(one.turns for one in admission.sets[A.id].sessions) == [1, 2]


def test_a_parent_keeps_its_place_while_its_children_work(admission: SessionAdmission) -> None:
    """It is expected only after their turns, and its wait for them is no pause of the traffic."""
    knows(admission, 1, 2, 3)
    limit_s = admission.habits.idle_limit_s
    turn(admission, named(prompt(1, 700), 11), A)
    child = begin(admission, named(prompt(2, 100), 12, parent=11), A, 0.8 * limit_s)
    child.end(1.6 * limit_s, served=True)
    assert waits(admission, prompt(3, 200), A, now=2.4 * limit_s)
    turn(admission, named(prompt(1, 710), 11), A, now=2.4 * limit_s)
    assert max(admission.habits._gaps)[0] == pytest.approx(0.8 * limit_s)
    admission.expire(10 * HORIZON_S)
    assert not admission.known._by_name
    turn(admission, named(prompt(2, 100), 12, parent=11), A, 10 * HORIZON_S)


class TwoRouters:
    """Two rules that share what they place at one engine, each with its own ledger of it."""

    def __init__(self) -> None:
        self.rules = [SessionAdmission(), SessionAdmission()]
        self.engines = [Engine(A.id), Engine(A.id)]
        self.turns = 0
        for rule_ in self.rules:
            rule_.habits.growth_tokens = 0.0
            knows(rule_, 1, 2, 3, 4)

    def begin(self, router: int, request: PickRequest, now: float = 0.0) -> tuple[SessionStay, int]:
        """Place a request by one router; the other is told."""
        self.turns += 1
        stay = begin(self.rules[router], request, A, now)
        self.rules[1 - router].placed_elsewhere(self.turns, request.facts, A.id, now)
        return stay, self.turns

    def end(
        self,
        router: int,
        turn: tuple[SessionStay, int],
        now: float = 0.0,
        *,
        served: bool = True,
        calls_tool: bool = True,
    ) -> None:
        """End a turn of one router; the other is told."""
        if not calls_tool:
            turn[0].calls_tool = False
        turn[0].end(now, served=served)
        self.rules[1 - router].ended_elsewhere(turn[1], now, served=served, calls_tool=calls_tool)

    def tell_rooms(self, now: float = 0.0) -> None:
        """Exchange the rows of the ledgers."""
        rows = [row_of(one.load, now) for one in self.engines]
        for rule_, one, row in zip(self.rules, self.engines, reversed(rows), strict=True):
            one.load.remote_load = one.load.remote_load or RemoteLoad(one.load)
            one.load.remote_load.tell("other", row, now)
            rule_.kept_elsewhere = {one.id} if one.load.remote_load.kept_since < math.inf else set()


def test_two_routers_fill_an_engine_once() -> None:
    """Each counts the other's residents, what they share once, until these end."""
    both = TwoRouters()
    first = both.begin(0, prompt(1, 800))
    assert waits(both.rules[1], prompt(2, 200), both.engines[1])
    both.end(0, first)
    assert waits(both.rules[1], prompt(2, 200), both.engines[1])
    again = both.begin(0, prompt(1, 810))
    both.end(0, again, served=False)
    assert not waits(both.rules[1], prompt(2, 800), both.engines[1])
    assert len(both.rules[1].known) == 0


def test_an_end_that_the_answer_shows_frees_the_place_at_every_router() -> None:
    """Each learns where sessions end so, from the answers of all."""
    both = TwoRouters()
    both.end(0, both.begin(0, prompt(1, 10)), calls_tool=False)
    for rule_ in both.rules:
        rule_.expire(HORIZON_S + 1.0)
        knows(rule_, 1, 1, 1, 2)
    last = both.begin(0, prompt(1, 800), HORIZON_S + 1.0)
    assert waits(both.rules[1], prompt(2, 200), both.engines[1])
    both.end(0, last, HORIZON_S + 1.0, calls_tool=False)
    assert [len(rule_.sets[A.id].sessions) for rule_ in both.rules] == [0, 0]


def test_a_session_goes_on_at_another_router() -> None:
    """Also if its turn comes there before the end of the one before is known; that end then changes nothing."""
    both = TwoRouters()
    stay, turn = both.begin(0, prompt(1, 800))
    stay.end(0.0, served=True)
    assert not waits(both.rules[1], prompt(1, 850), both.engines[1])
    second = both.begin(1, prompt(1, 850))
    both.rules[1].ended_elsewhere(turn, 0.1, served=False, calls_tool=True)
    both.rules[1].ended_elsewhere("unknown", 0.1, served=False, calls_tool=True)
    for rule_ in both.rules:
        assert [one.turns for one in rule_.sets[A.id].sessions] == [2]
        assert rule_.sets[A.id].running_tokens == 850 * BLOCK
    both.end(1, second)
    assert [rule_.sets[A.id].running_tokens for rule_ in both.rules] == [0, 0]


def test_a_wait_at_another_router_is_no_gap() -> None:
    """Else residents that will not come back keep their room for as long as others wait there."""
    both = TwoRouters()
    for number in range(1, 30):
        both.end(0, both.begin(0, prompt(1, 10 * number), 20.0 * number), 20.0 * number + 1.0)
    here, there = (rule_.habits for rule_ in both.rules)
    assert here.idle_limit_s > 18.0
    assert there.idle_limit_s <= Habits().idle_limit_s
    assert there.returning == here.returning


def test_prompts_without_blocks_placed_elsewhere_are_not_counted() -> None:
    """As those placed here."""
    rule_ = SessionAdmission()
    rule_.placed_elsewhere(1, OverlapFacts(10), A.id, 0.0)
    assert len(rule_.known) == 0


def test_the_first_to_come_keeps_room_at_all_routers() -> None:
    """Neither a later one that waits elsewhere nor a new one takes it, until its own router has placed it."""
    both = TwoRouters()
    resident = both.begin(0, prompt(1, 850))
    later = wait_for_room(both.rules[1], prompt(3, 100), 2.0)
    assert not later.has_room(both.engines[1:], 2.0)
    assert later.reserved == A.id
    early = wait_for_room(both.rules[0], prompt(2, 700), 1.0)
    assert not early.has_room(both.engines[:1], 2.0)
    both.tell_rooms(2.0)
    both.end(0, resident, 3.0, served=False)
    assert not later.has_room(both.engines[1:], 3.0)
    assert later.reserved is None
    both.begin(0, prompt(4, 10), 3.0)
    assert waits(both.rules[1], prompt(3, 10), both.engines[1], now=3.0)
    assert early.has_room(both.engines[:1], 3.0)
    early.over(3.0)
    both.tell_rooms(3.0)
    assert later.has_room(both.engines[1:], 3.0)


def test_sessions_that_may_wait_are_not_taken_for_single_requests() -> None:
    """Nowhere while some wait, here or at another router: their next turn may be among these."""
    both = TwoRouters()
    for number in (0, 1):
        turn(both.rules[number], prompt(1, 800), both.engines[number])
        waits(both.rules[number], prompt(2, 200), both.engines[number])
        both.rules[number].placed_elsewhere("other", prompt(4, 1).facts, A.id, 0.0)
    wait = wait_for_room(both.rules[0], prompt(2, 200), 0.0)
    assert not wait.has_room(both.engines[:1], 0.0)
    both.tell_rooms()
    head = prompt(1, 1).facts.blocks[0]
    for rule_ in both.rules:
        rule_.habits._note_outcome(head, 1)  # one more, and it counts as single
        rule_.expire(2 * HORIZON_S)
        assert len(rule_.known) == 1  # of the turn that is running
        assert rule_.habits._heads[head] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_sessions_leave_nothing_behind(seed: int) -> None:
    """With clients that leave, answers that fail, forks, engines that go, and waits that are given up."""
    rng = Random(seed)
    admission = SessionAdmission()
    engines = [Engine(EndpointId(str(number)), 400_000) for number in range(4)]
    sizes: dict[int, int] = {}
    running: list[SessionStay] = []
    waiting: list[tuple[SessionWait, PickRequest]] = []
    now = 0.0
    waited = 0
    for step in range(6000):
        now += 0.01
        session = rng.randrange(2048)
        sizes[session] = sizes.get(session, rng.randrange(5, 60)) + rng.randrange(20)
        asked = admission.restrict(prompt(session, sizes[session], shared=16), engines, now)
        open_to = [one for one in engines if one.id not in asked.excluded]
        if asked.waits_for_room:
            waited += 1
            waiting.append((wait_for_room(admission, asked, now), asked))
        else:
            running.append(begin(admission, asked, rng.choice(open_to), now))
        while len(running) > 64:
            running.pop(rng.randrange(len(running))).end(now, served=rng.random() < 0.9)
        for entry in rng.sample(waiting, min(4, len(waiting))):
            wait, request = entry
            if rng.random() < 0.1 or wait.has_room(engines, now):
                waiting.remove(entry)
                again = admission.restrict(request, engines, now)
                wait.over(now)
                if not again.waits_for_room:
                    running.append(begin(admission, again, rng.choice(engines), now))
        if step % 1500 == 1499:
            admission.forget(engines[step // 1500 % 4].id)
    assert waited > 100
    assert admission.given_way
    assert len(waiting) == len(admission.line.waits)
    for stay in running:
        stay.end(now, served=True)
    for wait, _ in waiting:
        wait.over(now)
    assert sum(len(one.sessions) for one in admission.sets.values()) > 10
    admission.expire(now + HORIZON_S + 1.0)
    assert len(admission.known) == len(admission.known.paused) == len(admission.known.idle) == 0
    assert not admission.line.waits
    assert not admission.line.kept
    for residents in admission.sets.values():
        assert not residents.sessions
        assert residents.running_tokens == 0
        assert residents.tokens(admission.habits.growth_tokens) == 0
