"""Changing a policy's parameters while it runs."""

from __future__ import annotations

import random

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.cluster.routing.registry import make_policy, policy_types
from kvproxy.cluster.settings import ClusterSettings, PolicyName, PrefixAffinitySettings
from kvproxy.operate.admin.clusters import ranges, tuned


def test_a_change_keeps_the_rest() -> None:
    """Settings are replaced whole, so that no choice sees half a change."""
    before = PrefixAffinitySettings(cache_threshold=0.2)
    after = tuned(before, {"balance_abs_threshold": 9})
    assert (before.balance_abs_threshold, after.model_dump()["cache_threshold"]) == (64, 0.2)
    assert after == PrefixAffinitySettings(cache_threshold=0.2, balance_abs_threshold=9)


def test_every_mistake_is_named_with_what_is_allowed() -> None:
    """Unknown names get the nearest one, wrong types and values their range; text and booleans are no numbers."""
    with pytest.raises(ConfigError) as raised:
        tuned(PrefixAffinitySettings(), {"cache_treshold": 1, "balance_rel_threshold": "1"})
    with pytest.raises(ConfigError) as others:
        tuned(PrefixAffinitySettings(), {"cache_threshold": 2, "balance_abs_threshold": True})
    found = {
        problem.path: (problem.message, problem.hint) for problem in (*raised.value.problems, *others.value.problems)
    }
    assert found["cache_treshold"] == ("unknown key", "did you mean 'cache_threshold'?")
    assert found["cache_threshold"] == ("must be less than or equal to 1, not 2", "allowed: 0 to 1")
    assert found["balance_abs_threshold"][1] == "allowed: 0 to 100000"
    assert found["balance_rel_threshold"][1] == "allowed: 1 to 1000"


def test_not_a_number_is_none() -> None:
    """A cost must stay comparable."""
    with pytest.raises(ConfigError):
        tuned(PrefixAffinitySettings(), {"cache_threshold": float("nan")})


@pytest.mark.parametrize("name", policy_types())
def test_every_parameter_has_a_range(name: PolicyName) -> None:
    """A tunable policy says what each of its parameters may be, and its own values are within."""
    policy = make_policy(name, ClusterSettings(), rng=random.Random(1))
    if policy.settings is not None:
        allowed = ranges(policy.settings)
        assert set(allowed) == set(policy.settings.model_dump())
        assert all(allowed.values())
        assert tuned(policy.settings, policy.settings.model_dump()) == policy.settings
