"""Observers of requests: each hears of the hooks it has, and one that fails costs no other anything."""

from __future__ import annotations

import pytest

from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import HOOKS, RequestObserver, notify


class Notes(RequestObserver):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def received(self, exchange: Exchange, now: float) -> None:
        self.heard.append(f"received at {now:g}")

    def attempt_failed(self, exchange: Exchange, reason: str, now: float) -> None:
        self.heard.append(f"failed by {reason}")


class Broken(RequestObserver):
    """Fails at everything."""

    def received(self, exchange: Exchange, now: float) -> None:
        raise ZeroDivisionError


def test_an_observer_that_fails_is_logged_and_the_others_hear_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """The request goes on, and so do the observers after it."""
    exchange, notes = Exchange(received_at=0.0), Notes()
    exchange.attach(Broken(), notes)
    notify(RequestObserver.received, exchange, 3.0)
    assert notes.heard == ["received at 3"]
    assert "an observer of requests failed: Broken at `received`" in caplog.text


def test_only_the_hooks_of_a_class_are_called() -> None:
    """Those that it inherits from a subclass too; the no-ops of the base class never are."""

    class Further(Notes):
        def finished(self, exchange: Exchange, now: float) -> None:
            self.heard.append("finished")

    assert RequestObserver.hooks == frozenset()
    assert Further.hooks == {"received", "attempt_failed", "finished"}
    exchange, further = Exchange(received_at=0.0), Further()
    exchange.attach(further)
    notify(RequestObserver.attempt_failed, exchange, "busy", 1.0)
    notify(RequestObserver.first_byte, exchange, 2.0)
    notify(RequestObserver.finished, exchange, 2.0)
    assert further.heard == ["failed by busy", "finished"]


def test_an_observer_may_be_added_by_another_one() -> None:
    """One that follows a share of the requests adds its own for each."""

    class Samples(RequestObserver):
        def received(self, exchange: Exchange, now: float) -> None:
            exchange.attach(notes)

    notes = Notes()
    exchange = Exchange(received_at=0.0)
    exchange.attach(Samples())
    notify(RequestObserver.received, exchange, 1.0)
    notify(RequestObserver.attempt_failed, exchange, "busy", 2.0)
    assert notes.heard[-1] == "failed by busy"


def test_every_hook_is_a_method() -> None:
    """The list and the class say the same."""
    public = {name for name in vars(RequestObserver) if not name.startswith("_")} - {"hooks", "wants_facts"}
    assert public == set(HOOKS)
