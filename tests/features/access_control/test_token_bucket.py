"""TokenBucket: arithmetic over given times."""

from __future__ import annotations

import pytest

from kvproxy.features.access_control.rate_limit import MAX_DEBT, TokenBucket


def test_starts_full_and_refills_at_its_rate() -> None:
    """Tokens that were taken come back with time, never more than fit."""
    bucket = TokenBucket(rate_per_s=2.0, capacity=10.0, now=0.0)
    bucket.charge(6.0, 0.0)
    assert bucket.level(0.0) == 4.0
    assert bucket.level(1.0) == 6.0
    assert bucket.level(100.0) == 10.0


@pytest.mark.parametrize(("charged", "amount", "wait_s"), [(0, 1, 0.0), (10, 1, 0.5), (14, 1, 2.5), (10, 50, 5.0)])
def test_wait(charged: float, amount: float, wait_s: float) -> None:
    """Debt is paid first; more than the bucket ever holds waits for a full one."""
    bucket = TokenBucket(rate_per_s=2.0, capacity=10.0, now=0.0)
    bucket.charge(charged, 0.0)
    assert bucket.wait_s(amount, 0.0) == wait_s
    assert bucket.wait_s(amount, wait_s) == 0.0


def test_a_clock_that_steps_back_gives_nothing() -> None:
    """Time only counts forward."""
    bucket = TokenBucket(rate_per_s=1.0, capacity=10.0, now=100.0)
    bucket.charge(5.0, 100.0)
    assert bucket.level(50.0) == 5.0
    assert bucket.level(101.0) == 6.0


def test_debts_are_bounded() -> None:
    """An engine that counts wrongly, or one request of a million tokens, locks no tenant out for hours."""
    bucket = TokenBucket(rate_per_s=2.0, capacity=10.0, now=0.0)
    bucket.charge(1e18, 0.0)
    assert bucket.level(0.0) == -MAX_DEBT * 10.0
    bucket.charge(-1e18, 0.0)
    assert bucket.level(0.0) == -MAX_DEBT * 10.0
