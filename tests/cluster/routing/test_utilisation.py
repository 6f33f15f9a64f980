"""The pool's utilisation by routed work."""

from __future__ import annotations

import pytest

from kvproxy.cluster.routing.traffic import Utilisation


def test_an_unknown_pool_counts_as_half_busy() -> None:
    """At whatever time the first request comes, and with it; less as the first window passes."""
    pool = Utilisation()
    assert pool.estimate_rates(1000.0)[0] == pytest.approx(0.5)
    pool.add(0.4, 2, 1000.0)
    assert pool.estimate_rates(1000.0)[0] == pytest.approx(0.51)
    assert pool.estimate_rates(1010.0)[0] == pytest.approx(0.26)


def test_only_routed_work_counts_after_a_window() -> None:
    """2 endpoints with 0.4 s a second: 0.2 each."""
    pool = Utilisation()
    for second in range(41):
        pool.add(0.4, 2, float(second))
    assert pool.estimate_rates(40.0)[0] == pytest.approx(0.2, rel=0.06)


def test_it_is_capped() -> None:
    """An overloaded pool still has a finite cost."""
    pool = Utilisation()
    pool.add(1e6, 1, 0.0)
    assert pool.estimate_rates(1.0)[0] == 0.9


def test_a_quiet_pool_is_idle() -> None:
    """Work of minutes ago is forgotten."""
    pool = Utilisation()
    pool.add(100.0, 1, 0.0)
    assert pool.estimate_rates(65.0)[0] == 0.0


def test_arrivals_are_counted_by_endpoint() -> None:
    """None at first; two a second over four endpoints; forgotten after a while."""
    pool = Utilisation()
    assert pool.estimate_rates(0.0)[1] == 0.0
    for tick in range(101):
        pool.add(0.1, 4, tick / 2)
    assert pool.estimate_rates(50.0)[1] == pytest.approx(0.5, rel=0.06)
    assert pool.estimate_rates(200.0)[1] == 0.0


@pytest.mark.parametrize("begins", [0.0, 500.0], ids=["at first", "after a quiet time"])
def test_requests_are_believed_to_go_on_as_they_began(begins: float) -> None:
    """A second of traffic is enough to expect more: not the whole window has to pass."""
    pool = Utilisation()
    if begins:
        pool.add(0.1, 4, 0.0)
    for tick in range(41):
        pool.add(0.1, 4, begins + tick / 20)
    assert pool.estimate_rates(begins + 2.0)[1] == pytest.approx(41 / 4 / 3.0, rel=0.1)
    assert pool.estimate_rates(begins + 19.0)[1] == pytest.approx(41 / 4 / 20.0, rel=0.1)
