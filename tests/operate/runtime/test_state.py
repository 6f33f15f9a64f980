"""States outlive the generation that made them, as long as another one uses them."""

from __future__ import annotations

import logging

import pytest

from kvproxy.operate.runtime.generation import GenerationStates, StateStore


class Counter:
    """A state."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        """Nothing uses it any more."""
        self.closed += 1


class Broken(Counter):
    """Cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("no luck today")


def counter(states: GenerationStates, name: str = "a", kind: type[Counter] = Counter) -> Counter:
    return states.get(kind, name, kind, close=kind.close)


def living(store: StateStore) -> GenerationStates:
    states = store.draft_states()
    states.keep_states()
    return states


def test_a_generation_finds_what_the_one_before_it_made() -> None:
    """By type and name, also when it asks twice."""
    store = StateStore()
    before = living(store)
    made = counter(before)
    after = store.draft_states()
    assert counter(before) is made
    assert counter(after) is made
    assert counter(after, "b") is not made
    assert counter(after, kind=Broken) is not made


def test_drafted_parts_of_a_refused_configuration_are_found_by_none() -> None:
    """A configuration that is refused leaves nothing behind."""
    store = StateStore()
    refused = counter(store.draft_states())
    assert counter(store.draft_states()) is not refused
    assert refused.closed == 0


def test_a_state_ends_with_the_last_generation_that_uses_it() -> None:
    """Once, and none that comes later finds it."""
    store = StateStore()
    first, second = living(store), living(store)
    made = counter(first)
    assert counter(second) is made
    first.release_states()
    assert made.closed == 0
    second.release_states()
    assert made.closed == 1
    assert counter(store.draft_states()) is not made


def test_a_state_that_comes_back_while_its_generation_drains_is_the_same() -> None:
    """The one between them does without it."""
    store = StateStore()
    first = living(store)
    made = counter(first)
    between = living(store)
    third = living(store)
    assert counter(third) is made
    first.release_states()
    between.release_states()
    assert made.closed == 0


def test_of_two_of_one_name_the_latest_is_found() -> None:
    """One ended and came back, and the first is still in use somewhere."""
    store = StateStore()
    first, second = living(store), living(store)
    old = counter(first)
    new = Counter()
    second.get(Counter, "b", lambda: new)
    assert counter(living(store), "b") is new
    assert counter(living(store)) is old


def test_one_that_cannot_be_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And the others are closed all the same."""
    store = StateStore()
    states = living(store)
    counter(states, kind=Broken)
    made = counter(states)
    with caplog.at_level(logging.ERROR, "kvproxy"):
        states.release_states()
    assert made.closed == 1
    assert "no luck today" in caplog.text
