"""Every policy by its name in the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from kvproxy.balancing.consistent_hash import ConsistentHash
from kvproxy.balancing.dynamo import Dynamo
from kvproxy.balancing.kv_aware import KvAware
from kvproxy.balancing.least_ttft import LeastTtft
from kvproxy.balancing.llm_d import LlmD
from kvproxy.balancing.lmetric import LMetric
from kvproxy.balancing.policy import Policy
from kvproxy.balancing.prefix_affinity import PrefixAffinity
from kvproxy.balancing.session import Session
from kvproxy.balancing.simple import LeastRequest, PowerOfTwo, RandomPolicy, RoundRobin
from kvproxy.config import schema
from kvproxy.config.model import Model

#: Makes a policy for one cluster, from that cluster's settings.
PolicyFactory = Callable[[random.Random, schema.Cluster], Policy]

POLICIES: Mapping[schema.PolicyName, PolicyFactory] = {
    schema.PolicyName.RANDOM: lambda rng, _: RandomPolicy(rng=rng),
    schema.PolicyName.ROUND_ROBIN: lambda _rng, _: RoundRobin(),
    schema.PolicyName.LEAST_REQUEST: lambda rng, _: LeastRequest(rng=rng),
    schema.PolicyName.POWER_OF_TWO: lambda rng, _: PowerOfTwo(rng=rng),
    schema.PolicyName.CONSISTENT_HASH: lambda rng, _: ConsistentHash(rng=rng),
    schema.PolicyName.SESSION: lambda rng, _: Session(rng=rng),
    schema.PolicyName.KV_AWARE: lambda rng, cluster: KvAware(rng=rng, settings=cluster.parameters.kv_aware),
    schema.PolicyName.PREFIX_AFFINITY: lambda rng, cluster: PrefixAffinity(
        rng=rng, settings=cluster.parameters.prefix_affinity
    ),
    schema.PolicyName.DYNAMO: lambda rng, cluster: Dynamo(rng=rng, settings=cluster.parameters.dynamo),
    schema.PolicyName.LLM_D: lambda rng, cluster: LlmD(rng=rng, settings=cluster.parameters.llm_d),
    schema.PolicyName.LMETRIC: lambda rng, _: LMetric(rng=rng),
    schema.PolicyName.LEAST_TTFT: lambda rng, _: LeastTtft(rng=rng),
}


def configured(settings: schema.Cluster, name: schema.PolicyName) -> Model | None:
    """The parameters that a policy of this name begins with in this cluster; None: it has none."""
    parameters: Model | None = getattr(settings.parameters, name.value, None)
    return parameters
