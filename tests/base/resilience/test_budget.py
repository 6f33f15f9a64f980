"""The retry budget: a share of recent requests plus a floor."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.resilience.retry import RetryBudget


def spend(budget: RetryBudget, now: float) -> int:
    """Retries taken until the budget refuses."""
    taken = 0
    while budget.withdraw_retry(now):
        taken += 1
    return taken


def left(budget: RetryBudget, now: float) -> int:
    """Return how many retries are left now."""
    return spend(copy.deepcopy(budget), now)


@pytest.mark.parametrize(
    ("requests", "share", "per_second", "allowed"),
    [(0, 0.2, 0.0, 0), (100, 0.2, 0.0, 20), (0, 0.2, 1.0, 10), (100, 0.2, 1.0, 30), (4, 0.2, 0.0, 0), (100, 0, 0, 0)],
)
def test_allows_the_share_and_the_floor(requests: int, share: float, per_second: float, allowed: int) -> None:
    """`share` of the window's requests, plus `min_per_second` for each of its ten seconds."""
    budget = RetryBudget(share=share, min_per_second=per_second)
    for _ in range(requests):
        budget.count_request(100.0)
    assert left(budget, 100.0) == allowed
    assert spend(budget, 100.0) == allowed
    assert left(budget, 100.0) == 0


def test_requests_leave_the_window() -> None:
    """Requests of ten seconds ago earn nothing any more."""
    budget = RetryBudget(share=0.5, min_per_second=0)
    for _ in range(10):
        budget.count_request(100.0)
    assert left(budget, 109.0) == 5
    assert left(budget, 110.0) == 0
    assert not budget.withdraw_retry(110.0)


def test_spent_retries_leave_the_window_too() -> None:
    """The floor grows back."""
    budget = RetryBudget(share=0, min_per_second=1)
    assert spend(budget, 100.0) == 10
    assert spend(budget, 109.9) == 0
    assert spend(budget, 110.0) == 10


def test_an_outage_is_not_multiplied() -> None:
    """With every request failing, retries stay at the share of the traffic."""
    budget = RetryBudget(share=0.2, min_per_second=0)
    retries = 0
    for request in range(10_000):
        now = 100 + request / 100
        budget.count_request(now)
        retries += budget.withdraw_retry(now)
    assert 1_900 <= retries <= 2_100


def test_time_that_steps_back_is_the_latest_time() -> None:
    """Callers may read their clocks in any order."""
    budget = RetryBudget(share=1, min_per_second=0)
    budget.count_request(100.0)
    budget.count_request(50.0)
    assert left(budget, 40.0) == 2


def test_requests_and_retries_of_other_proxies_count_like_our_own() -> None:
    """Workers share one budget: requests of others earn retries, and their retries are spent."""
    budget = RetryBudget(share=0.2, min_per_second=0)
    budget.count_others(100, 15, 100.0)
    assert left(budget, 100.0) == 5
    assert spend(budget, 100.0) == 5
    budget.count_others(0, 5, 105.0)
    assert left(budget, 105.0) == 0
    budget.count_others(100, 0, 111.0)
    assert left(budget, 111.0) == 15  # those of others leave the window too, each with what it spent
    assert budget.made == 5


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(min_value=0, max_value=3)),
        max_size=200,
    ),
    st.floats(min_value=0, max_value=1),
    st.floats(min_value=0, max_value=5),
)
def test_never_more_retries_than_share_and_floor(steps: list[tuple[bool, float]], share: float, floor: float) -> None:
    """Counted independently over any window of the slots' grid."""
    budget = RetryBudget(share=share, min_per_second=floor)
    now = 0.0
    requests: list[int] = []
    retries: list[int] = []
    for is_request, pause in steps:
        now += pause
        if is_request:
            budget.count_request(now)
            requests.append(int(now))
            continue
        recent_requests = sum(1 for second in requests if second > int(now) - 10)
        recent_retries = sum(1 for second in retries if second > int(now) - 10)
        allowed = recent_retries + 1 <= share * recent_requests + floor * 10
        assert budget.withdraw_retry(now) is allowed
        if allowed:
            retries.append(int(now))
