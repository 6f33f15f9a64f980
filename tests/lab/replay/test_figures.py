"""Figures of a replay, by hand."""

from __future__ import annotations

from kvproxy.lab.replay.results import percentile


def test_a_percentile_is_the_nearest_rank() -> None:
    """One of the values, counted from the least: of a hundred, ninety are below the 90th; nothing has 0."""
    hundred = [float(value) for value in range(100)]
    assert [percentile(hundred, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [0.0, 50.0, 90.0, 99.0, 99.0]
    assert [percentile([1.0, 2.0, 3.0], share) for share in (0.5, 0.9)] == [2.0, 3.0]
    assert percentile([], 0.5) == 0.0
