"""The coldest go first, and only as far as the service can."""

from __future__ import annotations

import logging

import pytest

from kvproxy.kvcache.actions.signals import Hotness, Pressure
from kvproxy.kvcache.actions.strategies import CLEAR_PAUSE_S, Evict
from kvproxy.kvcache.providers import ActionKind
from tests.kvcache.actions.support import BUSY, CALM, UNKNOWN, everywhere, hotness, serve, strategy

CAN = frozenset({ActionKind.EVICT})
CANNOT = frozenset({ActionKind.CLEAR})


def evict(known: Hotness, supports: frozenset[ActionKind] = CAN, **changes: object) -> Evict:
    return Evict(strategy(**changes), known, supports=lambda: supports)


def test_nothing_below_the_threshold_or_without_a_signal() -> None:
    known = hotness()
    serve(known, 1)
    served = serve(known, 2)
    for pressure in (CALM, UNKNOWN, Pressure(memory=0.89)):
        assert evict(known, memory_threshold=0.9).plan(served, everywhere(pressure), set(), 0.0) == []


def test_the_coldest_go_first_and_never_what_was_just_served() -> None:
    """Pixiu evicted the very prompt that had just been answered."""
    known = hotness()
    for key in (3, 1, 2):
        serve(known, key)
    served = serve(known, 9)
    actions = evict(known).plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
    assert [one.prefix.key for one in actions if one.prefix] == [3, 1, 2]
    assert {one.kind for one in actions} == {ActionKind.EVICT}


def test_neither_what_is_hot_nor_what_is_taken() -> None:
    """A prefix that this pass pins is not evicted by it."""
    known = hotness()
    serve(known, 1, times=2)
    pinned = serve(known, 2).prefixes[0]
    served = serve(known, 3)
    taken = {pinned.head, served.prefixes[0].head}
    assert evict(known).plan(served, everywhere(BUSY), taken, 0.0) == []


def test_a_pass_evicts_a_few() -> None:
    """Memory is read again before the next ones go."""
    known = hotness()
    for key in range(1, 50):
        serve(known, key)
    served = serve(known, 99)
    assert len(evict(known).plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)) == 4


def test_what_is_gone_is_not_evicted_again() -> None:
    known = hotness()
    serve(known, 1)
    served = serve(known, 2)
    under_test = evict(known)
    (action,) = under_test.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
    under_test.done(action, 0.0)
    assert under_test.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0) == []


def test_without_evict_it_is_said_once_and_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    """No LMCache controller has /evict."""
    known = hotness()
    serve(known, 1)
    under_test = evict(known, CANNOT)
    for _ in range(3):
        assert under_test.plan(serve(known, 2), everywhere(BUSY), set(), 0.0) == []
    assert caplog.text.count("cannot evict a single prefix: nothing is evicted") == 1


def test_a_location_is_cleared_only_where_the_operator_allows_it(caplog: pytest.LogCaptureFixture) -> None:
    """Clearing drops everything unpinned: never unasked, and not again before there is something to clear."""
    known = hotness()
    serve(known, 1)
    under_test = evict(known, CANNOT, allow_clear=True)
    with caplog.at_level(logging.WARNING):
        (action,) = under_test.plan(serve(known, 2), everywhere(BUSY), set(), 0.0)
    assert (action.kind, action.prefix) == (ActionKind.CLEAR, None)
    assert "cleared instead" in caplog.text
    under_test.done(action, 0.0)
    assert not list(known.walk_coldest("a"))
    assert under_test.plan(serve(known, 2), everywhere(BUSY), set(), CLEAR_PAUSE_S - 1) == []
    assert len(under_test.plan(serve(known, 2), everywhere(BUSY), set(), CLEAR_PAUSE_S)) == 1


def test_no_way_to_evict_or_clear_does_nothing() -> None:
    known = hotness()
    assert evict(known, frozenset(), allow_clear=True).plan(serve(known, 1), everywhere(BUSY), set(), 0.0) == []
