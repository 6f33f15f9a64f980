"""The coldest go first, and only as far as the service can."""

from __future__ import annotations

import logging

import pytest

from kvproxy.cache.actions.hotness import Hotness
from kvproxy.cache.prefix.eviction import Priority
from kvproxy.cache.store import ActionKind
from kvproxy.features.lmcache.cold_prefixes import BATCH, ColdPrefixes
from kvproxy.features.lmcache.pressure import Pressure
from kvproxy.features.lmcache.strategies import CLEAR_PAUSE_S, Evict
from tests.cache.support import tokens
from tests.features.lmcache.support import BUSY, CALM, UNKNOWN, everywhere, hotness, serve, strategy

CAN = frozenset({ActionKind.EVICT})
CANNOT = frozenset({ActionKind.CLEAR})


def evict(known: Hotness, supports: frozenset[ActionKind] = CAN, **changes: object) -> Evict:
    settings = strategy(**changes)
    return Evict(settings, known, ColdPrefixes(settings, known, {}), supports=lambda: supports)


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
    assert len(evict(known).plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)) == BATCH


def test_once_begun_it_goes_on_until_memory_is_well_below() -> None:
    """At the threshold itself one eviction would end it and the next answer begin it again."""
    known = hotness()
    under_test = evict(known, memory_threshold=0.9)
    acted = []
    for key, memory in enumerate((0.89, 0.9, 0.81, 0.79, 0.89), 1):
        serve(known, key)
        served = serve(known, 99, now=1.0)
        plan = under_test.plan(served, everywhere(Pressure(memory=memory)), {served.prefixes[0].head}, 1.0)
        acted.append(bool(plan))
    assert acted == [False, True, True, False, False]


def test_prefixes_promised_to_clients_are_evicted_last() -> None:
    """Until the promise ends, and whatever its score."""
    known = hotness()
    promised = serve(known, 1).prefixes[0]
    promised.promised_until = 100.0
    serve(known, 2, now=50.0)
    served = serve(known, 9, now=60.0)
    for now, order in ((60.0, [2, 1]), (100.0, [1, 2])):
        actions = evict(known).plan(served, everywhere(BUSY), {served.prefixes[0].head}, now)
        assert [one.prefix.key for one in actions if one.prefix] == order


def test_prefixes_kept_by_the_operator_are_never_evicted() -> None:
    """Nor what begins alike, since cache entries are shared."""
    known = hotness()
    kept = serve(known, 0xAB).prefixes[0]
    serve(known, 2, of=kept.tokens[:300])
    serve(known, 3)
    served = serve(known, 9)
    under_test = evict(known, keep_prefixes=[kept.name])
    actions = under_test.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
    assert [one.prefix.key for one in actions if one.prefix] == [3]


def test_a_priority_that_the_operator_sets_counts_at_once() -> None:
    """As a contract it goes last, as the operator's own never, and back to normal by its score."""
    known = hotness()
    priorities: dict[int, Priority] = {}
    serve(known, 1)
    serve(known, 2)
    served = serve(known, 9)
    cold = ColdPrefixes(strategy(), known, priorities)
    under_test = Evict(strategy(), known, cold, supports=lambda: frozenset({ActionKind.EVICT}))
    for priority, order in ((Priority.CONTRACT, [2, 1]), (Priority.OPERATOR, [2]), (None, [1, 2])):
        priorities.pop(1, None)
        if priority is not None:
            priorities[1] = priority
        actions = under_test.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
        assert [one.prefix.key for one in actions if one.prefix] == order


def test_an_evicted_prefix_is_not_evicted_again() -> None:
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


def test_the_prefix_used_less_goes_first() -> None:
    """By the score of frequency, size, recency and next use together."""
    known = hotness()
    for now in (0.0, 100.0):
        serve(known, 1, now=now, of=tokens(1024))
    serve(known, 2, now=50.0)
    served = serve(known, 9, now=200.0)
    under_test = evict(known, hot_content_threshold=9)
    action, *_ = under_test.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 200.0)
    assert action.prefix is not None
    assert action.prefix.key == 2
