"""Urgency as the number that engines get."""

from __future__ import annotations

import itertools

from kvproxy.cluster.routing.waiting_lines import urgency_s
from kvproxy.features.priority.urgency import EPOCH_S, UrgencyScale


def test_an_engine_sees_whole_milliseconds_in_the_same_order() -> None:
    """Requests that differ by a millisecond of urgency keep their order, in a hundred years too."""
    century = 100 * 365 * 86400.0
    urgencies = [urgency_s(own, century + at) for own, at in itertools.product((0.0, 0.002, 1.5), (0.0, 0.01, 60.0))]
    numbers = [UrgencyScale.engine_priority(urgency) for urgency in sorted(urgencies)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < 2**53


def test_an_ordinary_request_comes_after_one_without_a_number() -> None:
    """An engine counts a request without `priority` as 0: the operator's own calls to it do not starve."""
    today = 1_795_000_000.0 - EPOCH_S
    assert UrgencyScale.engine_priority(urgency_s(0.01, today)) > 0
