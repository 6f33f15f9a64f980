"""Requests that keep coming to the same endpoint."""

from __future__ import annotations

import math

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.traffic import ArrivalStats, EndpointArrivals

HERE, THERE = EndpointId("e0"), EndpointId("e1")


def look(subject: ArrivalStats, wait_s: float, now: float) -> EndpointArrivals:
    """Return the estimate of one endpoint, which is in use from then on."""
    (past,) = estimated = subject.estimate([HERE], [wait_s], now)
    subject.update([HERE], estimated)
    return past


def test_nothing_is_known_at_first() -> None:
    """No request is expected, and the present wait is the usual one."""
    past = look(ArrivalStats(), 3.0, 100.0)
    assert (past.bound_per_s, past.usual_wait_s) == (0.0, 3.0)


def test_arrivals_are_a_rate() -> None:
    """Two a second for minutes are two a second."""
    subject = ArrivalStats()
    for tick in range(600):
        look(subject, 0.0, tick / 2)
        subject.record_arrival(HERE)
    assert look(subject, 0.0, 300.0).bound_per_s == pytest.approx(2.0, rel=0.05)


def test_both_are_forgotten() -> None:
    """Arrivals over the memory, waits over twice as long; being asked often or seldom makes no difference."""
    often, seldom = ArrivalStats(memory_s=20.0), ArrivalStats(memory_s=20.0)
    for subject in (often, seldom):
        look(subject, 8.0, 0.0)
        subject.record_arrival(HERE)
    for second in range(1, 20):
        look(often, 0.0, float(second))
    for subject in (often, seldom):
        past = look(subject, 0.0, 20.0)
        assert past.bound_per_s == pytest.approx(math.exp(-1.0) / 20.0)
        assert past.usual_wait_s == pytest.approx(8.0 * math.exp(-0.5))


def test_an_unknown_endpoint_has_no_entry() -> None:
    """An arrival at an endpoint that no choice has looked at is not kept: entries are those of the pool."""
    subject = ArrivalStats()
    subject.record_arrival(HERE)
    assert subject.known() == {}


def test_an_endpoint_that_left_is_forgotten() -> None:
    """No entry outlives its endpoint; leaving twice is harmless."""
    subject = ArrivalStats()
    look(subject, 1.0, 0.0)
    subject.forget(HERE)
    subject.forget(HERE)
    assert subject.known() == {}


def test_endpoints_that_were_seen_at_different_times() -> None:
    """Each decays by its own time: candidates differ by model and by health."""
    subject = ArrivalStats(memory_s=10.0)
    subject.update([HERE], subject.estimate([HERE], [4.0], 0.0))
    subject.update([THERE], subject.estimate([THERE], [4.0], 10.0))
    first, second = subject.estimate([HERE, THERE], [0.0, 0.0], 20.0)
    assert first.usual_wait_s == pytest.approx(4.0 * math.exp(-1.0))
    assert second.usual_wait_s == pytest.approx(4.0 * math.exp(-0.5))


def test_an_estimate_changes_nothing() -> None:
    """Only `update` does, so that a decision may be asked for without being taken."""
    subject = ArrivalStats()
    look(subject, 4.0, 0.0)
    before = {name: (past.bound_per_s, past.usual_wait_s, past.at) for name, past in subject.known().items()}
    subject.estimate([HERE, THERE], [0.0, 0.0], 50.0)
    after = {name: (past.bound_per_s, past.usual_wait_s, past.at) for name, past in subject.known().items()}
    assert after == before
