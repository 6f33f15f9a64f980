"""Grants of tenants, as seconds by which they come later."""

from __future__ import annotations

import pytest

from kvproxy.features.priority.urgency import HALF_LIFE_S, MAX_BEHIND_S, MAX_TENANTS, TenantTurns


def test_a_tenant_alone_is_never_behind() -> None:
    """There is no other whose turn it could be."""
    turns = TenantTurns()
    for second in range(100):
        turns.grant_work("a", 1.0, float(second))
    assert turns.behind_s("a", 1, 101.0) == 0.0


def test_the_one_granted_more_comes_later() -> None:
    """By what it has above the mean, an endpoint."""
    turns = TenantTurns()
    turns.grant_work("greedy", 6.0, 100.0)
    turns.grant_work("polite", 2.0, 100.0)
    at = 101.0
    decayed = 0.5 ** (1.0 / HALF_LIFE_S)
    assert turns.behind_s("greedy", 1, at) == pytest.approx(2.0 * decayed)
    assert turns.behind_s("greedy", 4, at) == pytest.approx(0.5 * decayed)
    assert turns.behind_s("polite", 1, at) == 0.0
    assert turns.behind_s("new", 1, at) == 0.0


def test_nothing_starves() -> None:
    """However much a tenant was granted, it is behind by a bounded time."""
    turns = TenantTurns()
    turns.grant_work("greedy", 1e6, 100.0)
    turns.grant_work("polite", 0.1, 100.0)
    assert turns.behind_s("greedy", 1, 101.0) == MAX_BEHIND_S


def test_old_placements_are_forgotten() -> None:
    """Half of it a half-life, and in the end the name too."""
    turns = TenantTurns()
    turns.grant_work("greedy", 8.0, 100.0)
    turns.grant_work("polite", 4.0, 100.0)
    assert turns.behind_s("greedy", 1, 100.0 + HALF_LIFE_S) == pytest.approx(1.0)
    assert turns.behind_s("greedy", 1, 100.0 + 60 * HALF_LIFE_S) == 0.0


def test_tenants_beyond_the_bound_are_not_put_behind() -> None:
    """Names cost memory; a bound on them costs fairness among very many."""
    turns = TenantTurns()
    for number in range(MAX_TENANTS):
        turns.grant_work(f"t{number}", 1.0, 100.0)
    turns.grant_work("one more", 1000.0, 100.0)
    assert turns.behind_s("one more", 1, 101.0) == 0.0
