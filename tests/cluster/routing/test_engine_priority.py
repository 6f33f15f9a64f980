"""The scale of urgency."""

from __future__ import annotations

import itertools

import pytest

from kvproxy.cluster.routing.waiting_lines import AGEING, EPOCH_S, engine_priority, urgency_s


def test_the_shorter_of_two_that_came_together_goes_first() -> None:
    """Own work is what orders requests of one moment."""
    assert urgency_s(0.05, 100.0) < urgency_s(2.0, 100.0)


@pytest.mark.parametrize(("later_s", "overtakes"), [(1.0, True), (9.9, True), (10.1, False)])
def test_a_later_one_overtakes_only_as_much_as_it_is_shorter(later_s: float, overtakes: bool) -> None:
    """Three seconds less work are worth ten seconds of waiting."""
    assert (urgency_s(0.1, 100.0 + later_s) < urgency_s(3.1, 100.0)) is overtakes


def test_work_counts_at_the_endpoints_own_speed() -> None:
    """A slow endpoint takes longer for the same tokens."""
    assert urgency_s(2.0, 0.0, slowness=1.5) == pytest.approx(3.0)


def test_a_class_is_worth_seconds() -> None:
    """Ahead by as much as a request that came so much earlier, ageing considered."""
    assert urgency_s(1.0, 100.0, class_s=3.0) == pytest.approx(urgency_s(1.0, 100.0 - 3.0 / AGEING))


def test_an_engine_sees_whole_milliseconds_in_the_same_order() -> None:
    """Requests that differ by a millisecond of urgency keep their order, in a hundred years too."""
    century = 100 * 365 * 86400.0
    urgencies = [urgency_s(own, century + at) for own, at in itertools.product((0.0, 0.002, 1.5), (0.0, 0.01, 60.0))]
    numbers = [engine_priority(urgency) for urgency in sorted(urgencies)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < 2**53


def test_an_ordinary_request_comes_after_one_without_a_number() -> None:
    """An engine counts a request without `priority` as 0: the operator's own calls to it do not starve."""
    today = 1_795_000_000.0 - EPOCH_S
    assert engine_priority(urgency_s(0.01, today)) > 0
