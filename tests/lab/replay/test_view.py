"""The information of a replay's router: in flight at once, by events when they come, corrected by responses."""

from __future__ import annotations

from array import array
from random import Random

from kvproxy.base.types import Tier
from kvproxy.lab.replay.settings import IndexMode, ReplayFleet
from kvproxy.lab.replay.trace import Turn
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored
from tests.lab.replay.traces import shared_prefix_trace

TURN = shared_prefix_trace().sessions[0].turns[0]
BLOCKS = tuple(TURN.blocks)


def view(mode: IndexMode = IndexMode.EVENTS, **settings: float) -> IndexView:
    return IndexView(ReplayFleet(instances=2, index=mode, **settings), 512, rng=Random(1))  # type: ignore[arg-type]


def held(subject: IndexView) -> list[int]:
    """Blocks each endpoint is believed to hold of the turn's prompt."""
    facts = subject.facts(TURN)
    return [facts.matched_tokens(endpoint_id(index)) // 512 for index in range(2)]


def served(subject: IndexView, endpoint: int, turn: Turn, *, predicted: int = 0, cached: int = 0) -> None:
    """Serve a request from its facts to its response."""
    subject.facts(turn)
    subject.routed(endpoint, turn)(predicted, cached)


def test_in_flight_prompts_count_until_they_end_then_only_events_do() -> None:
    """A burst of one prefix must not scatter before the first event."""
    subject = view()
    subject.facts(TURN)
    settle = subject.routed(0, TURN)
    assert held(subject) == [6, 0]
    settle(0, 0)
    assert held(subject) == [0, 0]


def test_events_say_what_is_stored_removed_and_cleared() -> None:
    """The engines' own word."""
    subject = view()
    subject.observe(1, [BlockStored(BLOCKS, None)])
    assert held(subject) == [0, 6]
    subject.observe(1, [BlockRemoved(BLOCKS[4])])
    assert held(subject) == [0, 4]
    subject.observe(1, [AllBlocksCleared()])
    assert held(subject) == [0, 0]


def test_without_events_what_was_routed_stays() -> None:
    """Confirmed by its response."""
    subject = view(IndexMode.APPROXIMATE)
    served(subject, 0, TURN)
    assert held(subject) == [6, 0]


def test_a_contradiction_is_taken_out_at_once() -> None:
    """Predicted cached, the engine says no: the next request is not told the same."""
    subject = view(IndexMode.APPROXIMATE)
    served(subject, 1, TURN)
    other = Turn(0.0, 4 * 512, 1, TURN.blocks[:3] + array("Q", [999]))
    served(subject, 1, other, predicted=3 * 512, cached=512)
    assert held(subject) == [0, 3]


def test_events_nothing_backs_are_trusted_until_they_prove_wrong() -> None:
    """Another router may have sent it there; an engine that reuses nothing of it says otherwise."""
    subject = view()
    subject.observe(1, [BlockStored(BLOCKS, None)])
    assert held(subject) == [0, 6]
    for number in range(8):
        turn = Turn(0.0, TURN.prompt_tokens, 1, array("Q", range(10 * number + 5000, 10 * number + 5006)))
        subject.observe(1, [BlockStored(tuple(turn.blocks), None)])
        served(subject, 1, turn, predicted=6 * 512, cached=0)
    assert held(subject) == [0, 1]


def test_events_that_what_was_routed_backs_stay_trusted() -> None:
    """Whatever other claims of that endpoint proved worth."""
    subject = view()
    for number in range(8):
        turn = Turn(0.0, TURN.prompt_tokens, 1, array("Q", range(10 * number + 5000, 10 * number + 5006)))
        subject.observe(1, [BlockStored(tuple(turn.blocks), None)])
        served(subject, 1, turn, predicted=6 * 512, cached=0)
    served(subject, 1, TURN)
    subject.observe(1, [BlockStored(BLOCKS, None)])
    assert held(subject) == [0, 6]


def test_the_last_token_is_never_expected_from_the_cache() -> None:
    """A prompt of whole blocks, all of them held, still computes its last."""
    subject = view()
    subject.observe(0, [BlockStored(BLOCKS, None)])
    facts = subject.facts(Turn(0.0, 6 * 512, 1, TURN.blocks))
    assert facts.matched_tokens(endpoint_id(0)) == 5 * 512


def test_a_prefix_asked_for_often_is_hot() -> None:
    """Twice an endpoint within its window."""
    subject = view()
    assert subject.facts(TURN).hot_tokens == 0
    for _ in range(8):
        subject.facts(TURN)
        subject.routed(0, TURN)(0, 0)
    for _ in range(2):
        assert subject.facts(TURN).hot_tokens == 6 * 512


def test_asking_is_not_arriving() -> None:
    """A queued request's facts are asked for twice, and it is one request all the same."""
    subject = view()
    for _ in range(20):
        assert subject.facts(TURN).hot_tokens == 0


def test_tiers_are_told_apart_or_unheard() -> None:
    """Blocks that left the engine's memory are on its host tier; to a tier-blind router they are nowhere."""
    events = [BlockStored(BLOCKS, None), BlockStored(BLOCKS, None, medium="CPU"), BlockRemoved(BLOCKS[2])]
    aware, fleet = view(), ReplayFleet(instances=2)
    aware.observe(1, events)
    overlap = aware.facts(TURN).by_endpoint[endpoint_id(1)]
    assert (overlap.device_tokens, overlap.lower) == (2 * 512, ((Tier.HOST, 4 * 512),))
    blind = IndexView(fleet, 512, rng=Random(1), tier_blind=True)
    blind.observe(1, events)
    assert held(blind) == [0, 2]
