"""Pins are leases on hot prefixes, within a budget."""

from __future__ import annotations

from kvproxy.cache.store import Action, ActionKind
from kvproxy.features.lmcache.strategies import ActionRecord, Pin
from tests.cache.support import tokens
from tests.features.lmcache.support import CALM, everywhere, hotness, serve, strategy

PRESSURE = everywhere(CALM)
#: Actions of a service that counts pins.
COUNTED = frozenset({ActionKind.PIN, ActionKind.UNPIN})


def pinned(pin: Pin, actions: list[Action], now: float) -> None:
    for action in actions:
        pin.done(action, now)


def test_a_prefix_is_pinned_once_it_is_hot() -> None:
    known = hotness()
    pin = Pin(strategy(), known)
    assert pin.plan(serve(known, 1), PRESSURE, set(), 0.0) == []
    (action,) = pin.plan(served := serve(known, 1), PRESSURE, set(), 0.0)
    assert (action.kind, action.instance_id, action.prefix) == (ActionKind.PIN, "a", served.prefixes[0])


def test_a_pin_is_not_repeated_while_its_lease_runs() -> None:
    known = hotness()
    pin = Pin(strategy(pin_lease=300), known)
    pinned(pin, pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0), 0.0)
    assert pin.plan(serve(known, 1, now=239), PRESSURE, set(), 239.0) == []
    assert [one.reason for one in pin.plan(serve(known, 1, now=240), PRESSURE, set(), 240.0)] == ["renewal"]


def test_an_action_without_effect_is_no_lease() -> None:
    """Only `done` makes one: what failed is tried again with the next use."""
    known = hotness()
    pin = Pin(strategy(), known)
    assert len(pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0)) == 1
    assert len(pin.plan(serve(known, 1), PRESSURE, set(), 1.0)) == 1


def test_leases_of_hot_prefixes_are_renewed_between_requests() -> None:
    known = hotness()
    pin = Pin(strategy(pin_lease=300), known)
    pinned(pin, pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0), 0.0)
    assert pin.tick((), 100.0) == []
    renewals = pin.tick((), 250.0)
    assert [one.kind for one in renewals] == [ActionKind.PIN]
    pinned(pin, renewals, 250.0)
    assert list(pin.list_pins(400.0)) == [("a", 1)]


def test_a_lease_that_is_not_hot_any_more_lapses_and_is_forgotten() -> None:
    known = hotness()
    pin = Pin(strategy(pin_lease=300), known)
    pinned(pin, pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0), 0.0)
    assert pin.tick((), 301.0) == []
    assert not pin.list_pins(301.0)
    assert not pin.list_pins(301.0)


def test_lapsed_leases_do_not_pile_up() -> None:
    """Prefixes come and go for months."""
    known, record = hotness(), ActionRecord()
    pin = Pin(strategy(pin_lease=300), known, record)
    pinned(pin, pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0), 0.0)
    pin.tick((), 299.0)
    assert list(record.pins) == [("a", 1)]
    pin.tick((), 300.0)
    assert not record.pins


def test_the_budget_of_an_instance_is_kept() -> None:
    """Each prompt has 512 tokens: two fit in 1 200, at every instance again."""
    known = hotness()
    pin = Pin(strategy(pin_max_tokens=1200), known)
    for key in (1, 2, 3):
        pinned(pin, pin.plan(serve(known, key, times=2), PRESSURE, set(), 0.0), 0.0)
    assert len(pin.list_pins(0.0)) == 2
    assert len(pin.plan(serve(known, 3, instance="b"), PRESSURE, set(), 0.0)) == 1


def test_a_lapsed_lease_gives_its_budget_back() -> None:
    known = hotness()
    pin = Pin(strategy(pin_max_tokens=600, pin_lease=10), known)
    pinned(pin, pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0), 0.0)
    assert pin.plan(serve(known, 2, times=2), PRESSURE, set(), 1.0) == []
    assert len(pin.plan(serve(known, 2), PRESSURE, set(), 11.0)) == 1


def test_the_longest_hot_prefix_is_pinned() -> None:
    """A pin covers what it begins with: the system prompt alone is not pinned besides the chat."""
    known = hotness()
    pin = Pin(strategy(), known)
    serve(known, 1, 100, of=tokens(300) + tokens(200, start=9000))
    (action,) = pin.plan(serve(known, 1, 101, of=tokens(300) + tokens(200, start=7000)), PRESSURE, set(), 0.0)
    assert action.prefix is not None
    assert (action.prefix.key, action.prefix.tokens) == (1, tokens(300))
    (action,) = pin.plan(serve(known, 1, 101, of=tokens(300) + tokens(200, start=7000)), PRESSURE, set(), 0.0)
    assert action.prefix is not None
    assert action.prefix.key == 101


def test_a_configured_instance_pins_for_all() -> None:
    known = hotness()
    pin = Pin(strategy(pin_instance_id="vllm-b"), known)
    (action,) = pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0)
    assert action.instance_id == "vllm-b"


def test_pinned_tiers_are_taken() -> None:
    """No later strategy of the pass may evict it."""
    known = hotness()
    taken: set[int] = set()
    served = serve(known, 1, times=2)
    Pin(strategy(), known).plan(served, PRESSURE, taken, 0.0)
    assert taken == {served.prefixes[0].head}


def test_counted_pins_are_renewed_without_a_call_and_taken_back() -> None:
    """The coordinator counts pins and keeps them: pinning again would pin for ever."""
    known = hotness()
    pin = Pin(strategy(pin_lease=300), known, supports=lambda: COUNTED)
    pinned(pin, pin.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0), 0.0)
    assert pin.tick((), 250.0) == []
    assert pin.tick((), 480.0) == []
    (unpin,) = pin.tick((), 500.0)
    assert unpin.kind is ActionKind.UNPIN
    pin.done(unpin, 500.0)
    assert not pin.list_pins(500.0)
    assert pin.tick((), 1000.0) == []


def test_a_later_strategy_goes_on_with_the_leases_there_are() -> None:
    """After a reload: it pins nothing twice, and takes back what an earlier one pinned, once for both."""
    known, record = hotness(), ActionRecord()
    before = Pin(strategy(pin_lease=300), known, record, supports=lambda: COUNTED)
    pinned(before, before.plan(serve(known, 1, times=2), PRESSURE, set(), 0.0), 0.0)
    after = Pin(strategy(pin_lease=250), known, record, supports=lambda: COUNTED)
    assert after.plan(serve(known, 1), PRESSURE, set(), 1.0) == []
    (unpin,) = after.tick((), 500.0)
    assert unpin.kind is ActionKind.UNPIN
    assert before.tick((), 500.0) == []
    after.done(unpin, 500.0)
    assert not before.list_pins(500.0)
