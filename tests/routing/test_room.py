"""The room an engine has: what a scrape says of memory and slots, and what a request waits for them."""

from __future__ import annotations

import math

import pytest

from kvproxy.routing.load import EndpointLoad, Reservation
from kvproxy.routing.room import MAX_AGE_S, EngineState, Room, room_of
from kvproxy.routing.work import Features
from tests.routing.test_load import Samples

SECONDS: Features = (0.01, 1e-3, 0.0, 0.0)


def room(state: EngineState, before: Room | None = None, *, resident: int = 1000, pending: int = 0) -> Room:
    return room_of(state, before, resident_tokens=resident, pending_tokens=pending)


@pytest.mark.parametrize(
    ("used_share", "pending", "tokens"),
    [
        (0.5, 0, 2000.0),  # half of it is held by 1,000 prompt tokens with what was generated behind them
        (1.0, 200, 800.0),  # what waits to be prefilled holds nothing yet
        (0.49, 0, math.inf),  # more than half is free
        (None, 0, math.inf),  # not said
        (0.9, 1000, math.inf),  # other clients hold it: none of ours was admitted
    ],
)
def test_the_share_in_use_says_how_many_tokens_fit(used_share: float | None, pending: int, tokens: float) -> None:
    """In prompt tokens, whatever was shared or generated: the share was counted by the engine."""
    assert room(EngineState(5.0, used_share=used_share), pending=pending) == Room(tokens, math.inf, 5.0)


@pytest.mark.parametrize(
    ("running", "waiting", "pending", "used_share", "requests"),
    [
        (256, 30, 2000, 0.4, 256),  # all of these would fit one step: there is no slot for them
        (256, 3, 100, 0.4, math.inf),  # these came during the running step
        (8, 30, 60_000, 0.4, math.inf),  # these wait for prefill
        (200, 30, 2000, 0.97, math.inf),  # these may wait for memory
        (None, 30, 2000, 0.4, math.inf),
        (256, None, 2000, 0.4, math.inf),
    ],
)
def test_slots_are_full_where_short_prompts_wait(
    running: int | None, waiting: int | None, pending: int, used_share: float, requests: float
) -> None:
    """The limit is what runs while requests wait that neither prefill nor memory holds back."""
    assert room(EngineState(5.0, None, used_share, running, waiting), pending=pending).requests == requests


def test_a_limit_of_slots_stands_until_more_run() -> None:
    """An engine that came back with more slots is not held to what it had."""
    before = Room(math.inf, 256, 5.0)
    assert room(EngineState(10.0, running=100, waiting=0), before).requests == 256
    assert room(EngineState(10.0, running=257, waiting=0), before).requests == math.inf


def test_a_scrape_is_believed_for_a_while() -> None:
    """What is too old says nothing."""
    old = Room(1000.0, math.inf, 5.0)
    assert old.shortage(1500, 1, 5.0 + MAX_AGE_S) == pytest.approx(0.5)
    assert old.shortage(1500, 1, 5.1 + MAX_AGE_S) == 0.0


@pytest.mark.parametrize(
    ("resident", "in_flight", "shortage"), [(900, 3, 0.0), (1200, 3, 0.2), (900, 4, 0.25), (1200, 5, 0.5)]
)
def test_a_shortage_is_a_share_of_those_that_have_to_end(resident: int, in_flight: int, shortage: float) -> None:
    """Of memory or of slots, whichever is shorter; one request more is to have a place."""
    assert Room(1000.0, 4, 0.0).shortage(resident, in_flight, 0.0) == pytest.approx(shortage)


def run_for(load: EndpointLoad, seconds: float) -> None:
    """A request that stays so long, from 0 s on."""
    reservation = load.reserve(10, 0, 0.0)
    load.first_token(reservation, 0.1)
    load.release(reservation, seconds)


def full(load: EndpointLoad) -> Reservation:
    """4 slots, all taken, a request waits: the engine says so at 100 s."""
    run_for(load, 8.0)
    for _ in range(4):
        load.first_token(load.reserve(100, 0, 99.0), 99.5)
    waiting = load.reserve(100, 0, 100.0)
    load.observe_engine(EngineState(100.0, running=4, waiting=4))
    return waiting


def test_who_waits_for_a_slot_waits_until_enough_requests_end() -> None:
    """4 slots held for 8 s each: the second in line has one after about two ends, beside its turn in prefill."""
    load = EndpointLoad()
    full(load)
    waits = load.wait_s(SECONDS, 1.0, 100.0)
    assert waits == pytest.approx(0.11 + 8.0 * 2 / 4)
    assert load.backlog(SECONDS, 1.0, 100.0).wait_s(SECONDS, 1.0) == waits
    assert load.wait_s(SECONDS, 1.0, 100.0 + 1.1 * MAX_AGE_S) == pytest.approx(0.11)


def test_the_last_slot_is_waited_for_as_well() -> None:
    """With all of them taken, one of those that have them has to end first."""
    load = EndpointLoad()
    run_for(load, 8.0)
    load.room = Room(math.inf, 4, 100.0)
    for _ in range(2):
        load.first_token(load.reserve(100, 0, 99.0), 99.5)
    load.reserve(100, 0, 100.0)
    assert load.wait_s(SECONDS, 1.0, 100.0) == pytest.approx(0.11)
    load.first_token(load.reserve(100, 0, 100.0), 100.0)
    assert load.in_flight == 4
    waits = load.wait_s(SECONDS, 1.0, 100.0)
    assert waits == load.backlog(SECONDS, 1.0, 100.0).wait_s(SECONDS, 1.0)
    assert waits == pytest.approx(0.11 + 8.0 / 4)


def test_without_a_scrape_only_prefill_is_waited_for() -> None:
    """The same requests at an engine that is not read."""
    load = EndpointLoad()
    run_for(load, 8.0)
    for _ in range(4):
        load.first_token(load.reserve(100, 0, 99.0), 99.5)
    load.reserve(100, 0, 100.0)
    assert load.wait_s(SECONDS, 1.0, 100.0) == pytest.approx(0.11)


def test_waiting_for_a_slot_is_not_slow_prefill() -> None:
    """It would teach the speed model that this engine, and all others with it, computes slowly."""
    samples = Samples()
    load = EndpointLoad(on_sample=samples)
    waiting = full(load)
    samples.clear()
    load.first_token(waiting, 103.0)
    assert samples == []
    later = load.reserve(100, 0, 103.0 + MAX_AGE_S)
    load.first_token(later, 103.2 + MAX_AGE_S)
    assert len(samples) == 1


def test_an_overdue_step_counts_as_not_begun() -> None:
    """A step at work for much longer than it takes is something else: what is pending is all still to do, where it
    seemed nearly done before."""
    load = EndpointLoad()
    load.reserve(990, 0, 0.0)
    assert load.wait_s(SECONDS, 1.0, 1.9) == pytest.approx(0.05)
    assert load.wait_s(SECONDS, 1.0, 2.1) == pytest.approx(1.0)
    assert load.backlog(SECONDS, 1.0, 2.1).wait_s(SECONDS, 1.0) == pytest.approx(1.0)
