"""Every policy by its name in the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from kvproxy.balancing.consistent_hash import ConsistentHash
from kvproxy.balancing.policy import Policy
from kvproxy.balancing.session import Session
from kvproxy.balancing.simple import LeastRequest, PowerOfTwo, RandomPolicy, RoundRobin
from kvproxy.config import schema

#: Makes a policy for one cluster, from that cluster's settings.
PolicyFactory = Callable[[random.Random, schema.Cluster], Policy]

POLICIES: Mapping[schema.PolicyName, PolicyFactory] = {
    schema.PolicyName.RANDOM: lambda rng, _: RandomPolicy(rng=rng),
    schema.PolicyName.ROUND_ROBIN: lambda _rng, _: RoundRobin(),
    schema.PolicyName.LEAST_REQUEST: lambda rng, _: LeastRequest(rng=rng),
    schema.PolicyName.POWER_OF_TWO: lambda rng, _: PowerOfTwo(rng=rng),
    schema.PolicyName.CONSISTENT_HASH: lambda rng, _: ConsistentHash(rng=rng),
    schema.PolicyName.SESSION: lambda rng, _: Session(rng=rng),
}
