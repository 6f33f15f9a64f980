"""Changing a policy's parameters while it runs."""

from __future__ import annotations

import random

import pytest

from kvproxy.balancing.dynamo import DynamoSettings
from kvproxy.balancing.kv_aware import KvAwareSettings
from kvproxy.balancing.registry import POLICIES
from kvproxy.balancing.tuning import Tunable, ranges, tuned
from kvproxy.config.schema import Cluster, PolicyName
from kvproxy.errors import ConfigError


def test_a_change_keeps_the_rest() -> None:
    """Settings are replaced whole, so that no choice sees half a change."""
    before = KvAwareSettings(stall=0.2)
    after = tuned(before, {"kappa": 1})
    assert (before.kappa, after) == (None, KvAwareSettings(kappa=1.0, stall=0.2))


def test_every_mistake_is_named_with_what_is_allowed() -> None:
    """Unknown names get the nearest one, wrong types and values their range; text and booleans are no numbers."""
    with pytest.raises(ConfigError) as raised:
        tuned(KvAwareSettings(), {"kapa": 1, "stall": 2, "hot_discount": True, "kappa": "1"})
    found = {problem.path: (problem.message, problem.hint) for problem in raised.value.problems}
    assert found["kapa"] == ("unknown key", "did you mean 'kappa'?")
    assert found["stall"] == ("must be less than or equal to 1", "allowed: 0 to 1")
    assert found["hot_discount"][1] == "allowed: 0 to 1"
    assert found["kappa"][1] == "allowed: 0 to 10 or null"


def test_not_a_number_is_none() -> None:
    """A cost must stay comparable."""
    with pytest.raises(ConfigError):
        tuned(DynamoSettings(), {"temperature": float("nan")})


@pytest.mark.parametrize("name", PolicyName)
def test_every_parameter_has_a_range(name: PolicyName) -> None:
    """A tunable policy says what each of its parameters may be, and its own values are within."""
    policy = POLICIES[name](random.Random(1), Cluster())
    if isinstance(policy, Tunable):
        allowed = ranges(policy.settings)
        assert set(allowed) == set(policy.settings.model_dump())
        assert all(allowed.values())
        assert tuned(policy.settings, policy.settings.model_dump()) == policy.settings
    else:
        assert not hasattr(policy, "settings")
