"""Changing a policy's parameters while it runs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.base.settings.compose import composed
from kvproxy.cluster.routing.registry import (
    configured,
    make_policy,
    merge_config,
    policy_types,
    ranges,
    runtime_overrides,
    tuned,
)
from kvproxy.cluster.settings import (
    ClusterSettings,
    KvAwareSettings,
    PolicyName,
    PolicyParameters,
    PrefixAffinitySettings,
)


def test_a_change_keeps_the_rest() -> None:
    """Settings are replaced whole, so that no choice sees half a change."""
    before = PrefixAffinitySettings(cache_threshold=0.2)
    after = tuned(before, {"balance_abs_threshold": 9})
    assert (before.balance_abs_threshold, after.model_dump()["cache_threshold"]) == (64, 0.2)
    assert after == PrefixAffinitySettings(cache_threshold=0.2, balance_abs_threshold=9)


def test_every_mistake_is_named_with_what_is_allowed() -> None:
    """Unknown names get the nearest one, wrong types and values their range; text and booleans are no numbers."""
    with pytest.raises(ConfigError) as raised:
        tuned(KvAwareSettings(), {"target_it": 1, "target_itl": "1"})
    with pytest.raises(ConfigError) as others:
        tuned(PrefixAffinitySettings(), {"cache_threshold": 2, "balance_abs_threshold": True})
    found = {
        problem.path: (problem.message, problem.hint) for problem in (*raised.value.problems, *others.value.problems)
    }
    assert found["target_it"] == ("unknown key", "did you mean 'target_itl'?")
    assert found["cache_threshold"] == ("must be less than or equal to 1, not 2", "allowed: 0 to 1")
    assert found["balance_abs_threshold"][1] == "allowed: 0 to 100000"
    assert found["target_itl"][1] == "allowed: 0.001 to 10 or null"


def test_not_a_number_is_none() -> None:
    """A cost must stay comparable."""
    with pytest.raises(ConfigError):
        tuned(KvAwareSettings(), {"target_itl": float("nan")})


@pytest.mark.parametrize("name", policy_types())
def test_every_parameter_has_a_range(name: PolicyName) -> None:
    """A tunable policy says what each of its parameters may be, and its own values are within."""
    policy = make_policy(name, ClusterSettings(), rng=random.Random(1))
    if policy.settings is not None:
        allowed = ranges(policy.settings)
        assert set(allowed) == set(policy.settings.model_dump())
        assert all(allowed.values())
        assert tuned(policy.settings, policy.settings.model_dump()) == policy.settings


def test_a_policy_begins_with_what_the_configuration_gives_it() -> None:
    """Each its own part of `parameters`; those without parameters none."""
    parameters = composed(PolicyParameters).model_validate({"kv_aware": {"target_itl": 0.5}})
    cluster = ClusterSettings(parameters=parameters)
    for name in policy_types():
        policy = make_policy(name, cluster, rng=random.Random(1))
        assert configured(cluster, name) == policy.settings
    assert configured(cluster, PolicyName.KV_AWARE) == KvAwareSettings(target_itl=0.5)


def test_only_what_an_operator_changed_is_an_override() -> None:
    """Values of the configuration are none."""
    cluster = ClusterSettings(parameters=PolicyParameters(kv_aware=KvAwareSettings(target_itl=0.5)))
    policy: Any = make_policy(PolicyName.KV_AWARE, cluster, rng=random.Random(1))
    given = configured(cluster, PolicyName.KV_AWARE)
    assert runtime_overrides(policy, given) == {}
    policy.settings = tuned(policy.settings, {"target_itl": 2.0})
    assert runtime_overrides(policy, given) == {"target_itl": 2.0}
    assert runtime_overrides(policy, None) == {}


def test_settings_of_another_kind_are_left_alone() -> None:
    """A policy of the user's own stands under a built-in name and has parameters of its own."""
    policy: Any = make_policy(PolicyName.PREFIX_AFFINITY, ClusterSettings(), rng=random.Random(1))
    merge_config(policy, KvAwareSettings(), KvAwareSettings(target_itl=0.5))
    assert policy.settings == PrefixAffinitySettings()
