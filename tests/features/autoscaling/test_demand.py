"""How many endpoints are wanted: by what comes, by what waits, and how fast that is believed."""

from __future__ import annotations

import random

import pytest

from kvproxy.features.autoscaling.scaling import Demand


def wanted(demand: Demand, now: float, *, backlog_s: float = 0.0, busy: bool = False, most: int = 100) -> float:
    return demand.wanted(backlog_s, now, wanted_wait_s=0.5, busy=busy, most=most)


def arrive(demand: Demand, *, per_s: float, own_s: float, for_s: float, now: float = 0.0) -> float:
    """Evenly spaced; the time after the last one."""
    for _ in range(int(per_s * for_s)):
        demand.placed(own_s, now)
        now += 1 / per_s
    return now


def test_idle_wants_none_and_busy_a_little() -> None:
    """Rounded up after the sum over proxies that is one."""
    assert wanted(Demand(), 5.0) == 0.0
    assert 0 < wanted(Demand(), 5.0, busy=True) < 0.1


@pytest.mark.parametrize(("per_s", "own_s"), [(100, 0.02), (10, 0.2), (1, 2.0)])
def test_the_same_work_in_larger_pieces_wants_more(per_s: float, own_s: float) -> None:
    """Two seconds of prefill a second, with the wait behind one request of `own_s` on average: a + b / 2w."""
    demand = Demand()
    now = arrive(demand, per_s=per_s, own_s=own_s, for_s=600)
    assert wanted(demand, now, busy=True) == pytest.approx(2 + per_s * own_s**2 / (2 * 0.5), rel=0.05)


def test_so_many_endpoints_wait_as_long_as_is_wanted() -> None:
    """The number it asks for, tried in a simulation of so many single servers that share arrivals at random."""
    rng, demand = random.Random(1), Demand()
    now, arrivals = 0.0, []
    while now < 3000:
        now += rng.expovariate(12)
        own_s = rng.expovariate(4)
        arrivals.append((now, own_s))
        demand.placed(own_s, now)
    count = round(wanted(demand, now, busy=True))
    free_at = [0.0] * count
    waits = []
    for at, own_s in arrivals:
        server = rng.randrange(count)
        begins = max(at, free_at[server])
        waits.append(begins - at)
        free_at[server] = begins + own_s
    mean = sum(waits) / len(waits)
    assert 0.35 < mean < 0.7


def test_a_backlog_is_believed_soon_and_forgotten_slowly() -> None:
    """Ten seconds of prefill that wait are twenty endpoints for half a second each."""
    demand = Demand()
    demand.sample(0.0, 0.0)
    assert wanted(demand, 0.0, backlog_s=10.0) == 0.0
    demand.sample(10.0, 10.0)
    assert wanted(demand, 10.0, backlog_s=10.0) == pytest.approx(20 * 0.632, rel=0.01)
    demand.sample(10.0, 60.0)
    assert wanted(demand, 70.0, backlog_s=0.0) == pytest.approx(20 * 0.846, rel=0.02)
    assert wanted(demand, 600.0, backlog_s=0.0) == 0.0


def test_more_than_the_bound_is_never_wanted() -> None:
    """However much waits."""
    assert wanted(Demand(), 0.0, backlog_s=1e9, most=7) == 7


def test_arrivals_are_forgotten() -> None:
    """An hour later nothing is wanted."""
    demand = Demand()
    now = arrive(demand, per_s=10, own_s=0.2, for_s=100)
    assert wanted(demand, now + 60) < wanted(demand, now) / 2
    assert wanted(demand, now + 3600) == 0.0


def test_asking_changes_nothing_and_the_backlog_is_looked_at_once_a_second() -> None:
    """It may be asked in another thread, as often as one likes."""
    demand = Demand()
    assert demand.placed(0.1, 100.0)
    demand.sample(1.0, 100.0)
    first = wanted(demand, 130.0)
    assert [wanted(demand, 130.0) for _ in range(3)] == [first] * 3
    assert not demand.placed(0.1, 100.5)
    assert demand.placed(0.1, 101.0)
