"""Which size of cache is enough for a trace."""

from __future__ import annotations

from dataclasses import replace

from kvproxy.lab.planner.traffic import Row, Wanted
from kvproxy.lab.replay.results import summarize_outcomes

NOTHING = summarize_outcomes([], 1)


def row(tokens: int, *, failed: int = 0, hit_rate: float = 0.9, ttft_s: float = 0.1) -> Row:
    """Return the result of a cache of this size."""
    return Row(tokens / 100, tokens, replace(NOTHING, failed=failed, hit_rate=hit_rate, ttft_mean_s=ttft_s), [ttft_s])


def test_a_size_at_which_requests_fail_is_not_enough() -> None:
    """However well the others do there; nor is a smaller one at which none happened to."""
    small, failing, large = row(100), row(200, failed=1), row(300)
    for wanted in (Wanted(), Wanted(hit_rate=0.5), Wanted(ttft_s=1.0)):
        assert not wanted.holds(failing.summary)
        assert wanted.find_smallest([small, failing, large]) is large
        assert wanted.find_smallest([small, large, failing]) is large
    assert Wanted().find_smallest([failing]) is None


def test_both_wishes_count() -> None:
    """Each exactly where it is reached."""
    assert Wanted(hit_rate=0.9, ttft_s=0.1).holds(row(1).summary)
    assert not Wanted(hit_rate=0.91, ttft_s=0.1).holds(row(1).summary)
    assert not Wanted(hit_rate=0.9, ttft_s=0.09).holds(row(1).summary)
    assert Wanted(hit_rate=0.5).find_smallest([row(1, hit_rate=0.4), row(2, hit_rate=0.5), row(3)]) == row(
        2, hit_rate=0.5
    )
