"""The scale of urgency."""

from __future__ import annotations

import pytest

from kvproxy.cluster.routing.waiting_lines import AGEING, urgency_s


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
