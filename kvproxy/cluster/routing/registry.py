"""Policies by their names in the configuration."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvproxy.base.installed import installed
from kvproxy.cluster.feature import ClusterFeature
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.policy import Policy
from kvproxy.cluster.routing.simple import LeastRequest, PowerOfTwo, RandomPolicy, RoundRobin
from kvproxy.cluster.settings import PolicyName

POLICIES: Mapping[PolicyName, type[Policy]] = {
    PolicyName.RANDOM: RandomPolicy,
    PolicyName.ROUND_ROBIN: RoundRobin,
    PolicyName.LEAST_REQUEST: LeastRequest,
    PolicyName.POWER_OF_TWO: PowerOfTwo,
    PolicyName.KV_AWARE: KvAware,
}


def policy_types() -> Mapping[PolicyName, type[Policy]]:
    """Return the core's, and those of installed features."""
    added = (feature.policy_types() for feature in installed(ClusterFeature))
    return {**POLICIES, **{name: kind for policies in added for name, kind in policies.items()}}


def make_policy(name: PolicyName, *, rng: random.Random) -> Policy:
    """Return a fresh policy of this name."""
    return policy_types()[name](rng=rng)
