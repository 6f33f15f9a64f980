"""A policy's parameters, as configured and as changed while it runs."""

from __future__ import annotations

import random
from typing import Any

from kvproxy.base.settings.compose import composed
from kvproxy.cluster.routing.registry import (
    configured,
    make_policy,
    merge_config,
    policy_types,
    runtime_overrides,
)
from kvproxy.cluster.settings import (
    ClusterSettings,
    PolicyName,
    PolicyParameters,
    PrefixAffinitySettings,
    RouterQueueSettings,
)


def test_a_policy_begins_with_what_the_configuration_gives_it() -> None:
    """Each its own part of `parameters`; those without parameters none."""
    parameters = composed(PolicyParameters).model_validate({"prefix_affinity": {"cache_threshold": 0.5}})
    cluster = ClusterSettings(parameters=parameters)
    for name in policy_types():
        policy = make_policy(name, cluster, rng=random.Random(1))
        assert configured(cluster, name) == policy.settings
    assert configured(cluster, PolicyName.PREFIX_AFFINITY) == PrefixAffinitySettings(cache_threshold=0.5)


def test_only_what_an_operator_changed_is_an_override() -> None:
    """Values of the configuration are none."""
    cluster = ClusterSettings(parameters=PolicyParameters(prefix_affinity=PrefixAffinitySettings(cache_threshold=0.5)))
    policy: Any = make_policy(PolicyName.PREFIX_AFFINITY, cluster, rng=random.Random(1))
    given = configured(cluster, PolicyName.PREFIX_AFFINITY)
    assert runtime_overrides(policy, given) == {}
    policy.settings = PrefixAffinitySettings(cache_threshold=0.2)
    assert runtime_overrides(policy, given) == {"cache_threshold": 0.2}
    assert runtime_overrides(policy, None) == {}


def test_settings_of_another_kind_are_left_alone() -> None:
    """A policy of the user's own stands under a built-in name and has parameters of its own."""
    policy: Any = make_policy(PolicyName.PREFIX_AFFINITY, ClusterSettings(), rng=random.Random(1))
    merge_config(policy, RouterQueueSettings(), RouterQueueSettings(limit=5))
    assert policy.settings == PrefixAffinitySettings()
