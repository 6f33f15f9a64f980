"""Whether it pays to tell engines an order."""

from __future__ import annotations

import random

import pytest

from kvproxy.features.priority.priority_trial import ENOUGH, SETTLING_S, STANDS_S, WINDOW_S, PriorityPayoff


def play(payoff: PriorityPayoff, *, mean: float, tail: float, seed: int = 1, began: float = 0.0) -> float:
    """Traffic whose times to first token change so where the number is sent, until it is decided; when that is."""
    rng = random.Random(seed)
    at, decided = began, payoff.mean_ratio
    while payoff.mean_ratio is decided:
        at += 0.1
        ttft_s = rng.expovariate(1.0)
        if payoff.sends_priority(at):
            ttft_s *= tail if ttft_s > 3.0 else mean
        payoff.observe_wait(at, ttft_s)
    return at


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mean", "tail", "pays"), [(0.6, 1.1, True), (0.97, 1.4, False), (1.2, 1.2, False)])
def test_it_pays_where_the_mean_gains_more_than_p99_pays(mean: float, tail: float, pays: bool, seed: int) -> None:
    """By their shares, each against windows without."""
    payoff = PriorityPayoff()
    at = play(payoff, mean=mean, tail=tail, seed=seed)
    assert payoff.pays is pays
    assert payoff.mean_ratio is not None
    assert payoff.p99_ratio is not None
    assert payoff.p99_ratio == pytest.approx(tail, rel=0.2)
    assert {payoff.sends_priority(at + later) for later in (1.0, WINDOW_S, STANDS_S - 1.0)} == {pays}


def test_until_it_is_known_every_other_window_is_without() -> None:
    """So that load that changes over the day is the same for both."""
    payoff = PriorityPayoff()
    assert [payoff.sends_priority(number * WINDOW_S + 1.0) for number in range(4)] == [True, False, True, False]
    assert payoff.pays is None


def test_the_beginning_of_a_window_does_not_count() -> None:
    """Requests that wait there were placed in the other kind."""
    payoff = PriorityPayoff()
    payoff.observe_wait(SETTLING_S - 1.0, 1.0)
    assert payoff.counted == (0, 0)
    payoff.observe_wait(SETTLING_S, 1.0)
    payoff.observe_wait(WINDOW_S + SETTLING_S, 1.0)
    assert payoff.counted == (1, 1)


def test_a_decision_is_looked_at_again() -> None:
    """Traffic changes: after some hours it is measured once more, from nothing."""
    payoff = PriorityPayoff()
    at = play(payoff, mean=0.6, tail=1.0)
    assert payoff.pays
    at = play(payoff, mean=1.0, tail=1.5, began=at + STANDS_S)
    assert not payoff.pays
    assert payoff.counted == (0, 0)
    payoff.observe_wait(at + 1.0, 1.0)
    assert payoff.counted == (0, 0)


def test_a_p99_needs_many() -> None:
    """One in a hundred of so many is twenty."""
    assert ENOUGH // 100 >= 20
