"""One score says what goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.cache.prefix.eviction import Use, Weights, score_use

AMOUNTS = st.floats(0, 1e9)
TERMS = (Weights(1, 0, 0, 0), Weights(0, 1, 0, 0), Weights(0, 0, 1, 0), Weights(0, 0, 0, 1), Weights())


@given(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.sampled_from(TERMS))
def test_a_score_is_from_0_to_1(uses: float, size: float, idle: float, gap: float, weights: Weights) -> None:
    """Whatever the weights are."""
    assert 0 <= score_use(Use(uses, size, idle, gap), weights, span=300, size=4096) <= 1


@given(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.sampled_from(TERMS))
def test_the_end_of_a_prompt_never_outlasts_its_beginning(
    uses: float, size: float, idle: float, gap: float, weights: Weights
) -> None:
    """A beginning is used whenever the end is, and is shorter: it never has the higher score."""
    end = score_use(Use(uses, size, idle, gap), weights, span=300, size=4096)
    beginning = score_use(Use(uses + 1, size / 2, idle / 2, gap / 2), weights, span=300, size=4096)
    assert beginning <= end + 1e-9


@pytest.mark.parametrize(("idle", "expected"), [(0, 0.25), (100, 0.25), (300, 0.5), (900, 0.75)])
def test_an_overdue_use_is_expected_ever_later(idle: float, expected: float) -> None:
    """It came every 100 s: until then nothing is known, and a session that stays away may be over."""
    assert score_use(Use(5, 0, idle, 100), Weights(0, 0, 0, 1), span=300, size=1) == pytest.approx(expected)
