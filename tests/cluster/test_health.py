"""The health of one endpoint: a state machine with time as an argument."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvproxy.cluster.engine import Health
from kvproxy.cluster.settings import HealthCheckSettings


def health(**settings: Any) -> Health:
    return Health(HealthCheckSettings(**settings))


@pytest.mark.parametrize(
    ("probes", "verdict"),
    [
        ("", True),
        ("-", False),  # never seen well: the first failure counts
        ("+-", True),
        ("+--", False),
        ("+-+-", True),  # not in a row
        ("+--+", True),
        ("-+", True),
    ],
)
def test_probes_decide_by_runs(probes: str, verdict: bool) -> None:
    """Two failures in a row take it out, one success brings it back."""
    subject = health(unhealthy_threshold=2, healthy_threshold=1)
    for mark in probes:
        subject.record_probe(mark == "+", 0.0)
    assert subject.is_healthy is verdict


def test_it_comes_back_after_enough_good_probes() -> None:
    """`probe` says when the verdict changed, and only then."""
    subject = health(unhealthy_threshold=1, healthy_threshold=3)
    said = [subject.record_probe(mark == "+", 0.0) for mark in "+-++-+++"]
    assert said == [False, True, False, False, False, False, False, True]


@pytest.mark.parametrize(
    ("eject_after", "failures", "deserves"), [(3, 2, False), (3, 3, True), (1, 1, True), (0, 99, False)]
)
def test_failed_requests_in_a_row_deserve_ejection(eject_after: int, failures: int, deserves: bool) -> None:
    """0 never ejects."""
    subject = health(eject_after=eject_after)
    assert [subject.record_failure(0.0) for _ in range(failures)][-1] is deserves


def test_a_success_forgets_the_failures_before_it() -> None:
    """Only failures in a row count."""
    subject = health(eject_after=2)
    for _ in range(5):
        assert not subject.record_failure(0.0)
        subject.record_success()
    assert subject.failures == 0


def test_an_ejection_ends_by_itself() -> None:
    """Exactly `eject_for` later."""
    subject = health(eject_for=10)
    assert subject.eject(100.0) == 10
    assert subject.ejected(109.999)
    assert not subject.ejected(110.0)


def test_ejections_double_up_to_their_bound() -> None:
    """One right after the other."""
    subject, now, lengths = health(eject_for=60), 0.0, []
    for _ in range(5):
        lengths.append(subject.eject(now))
        now = subject.ejected_until
    assert lengths == [60, 120, 240, 300, 300]


def test_an_ejection_of_more_than_five_minutes_lasts_as_long_as_the_first() -> None:
    subject = health(eject_for=3600)
    assert [subject.eject(0.0), subject.eject(3600.0)] == [3600, 3600]


@pytest.mark.parametrize(("good_s", "length_s"), [(0, 80), (9.9, 80), (10, 40), (29, 20), (1000, 10)])
def test_good_behaviour_takes_doublings_back(good_s: float, length_s: float) -> None:
    """One for each `eject_for` since the last ejection ended."""
    subject, now = health(eject_for=10), 0.0
    for _ in range(3):
        subject.eject(now)
        now = subject.ejected_until
    assert subject.eject(now + good_s) == length_s


def test_an_ejection_of_no_length_never_keeps_anybody_out() -> None:
    """`eject_for: 0` is allowed and harmless."""
    subject = health(eject_for=0)
    assert [subject.eject(1.0), subject.eject(2.0)] == [0, 0]
    assert not subject.ejected(2.0)


def test_ejections_stay_bounded_after_very_many() -> None:
    """No overflow in the thousandth."""
    subject, now = health(eject_for=10), 0.0
    for _ in range(2000):
        subject.eject(now)
        now = subject.ejected_until
    assert subject.ejected_until - 300 <= now


def test_requests_failing_late_do_not_prolong_an_ejection() -> None:
    """Requests in flight at the ejection fail after it; that is no new evidence."""
    subject = health(eject_after=1, eject_for=10)
    subject.eject(0.0)
    assert not any(subject.record_failure(5.0) for _ in range(50))
    assert subject.failures == 0


def test_failures_count_from_nothing_after_an_ejection() -> None:
    """Coming back it gets a whole run of chances again."""
    subject = health(eject_after=3, eject_for=10)
    assert [subject.record_failure(0.0) for _ in range(3)] == [False, False, True]
    subject.eject(0.0)
    assert [subject.record_failure(10.0) for _ in range(3)] == [False, False, True]


def test_next_change_is_the_end_of_an_ejection() -> None:
    """Otherwise there is none."""
    subject = health(eject_for=10)
    assert subject.next_change(0.0) == math.inf
    subject.eject(0.0)
    assert subject.next_change(5.0) == 10.0
    assert subject.next_change(10.0) == math.inf
