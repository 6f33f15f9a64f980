"""Every policy by its name in the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from kvproxy.config.cluster_schema import ClusterSettings, PolicyName
from kvproxy.config.model import Model
from kvproxy.routing.consistent_hash import ConsistentHash
from kvproxy.routing.dynamo import Dynamo
from kvproxy.routing.kv_aware import KvAware
from kvproxy.routing.least_ttft import LeastTtft
from kvproxy.routing.llm_d import LlmD
from kvproxy.routing.lmetric import LMetric
from kvproxy.routing.policy import Policy
from kvproxy.routing.prefix_affinity import PrefixAffinity
from kvproxy.routing.session import Session
from kvproxy.routing.simple import LeastRequest, PowerOfTwo, RandomPolicy, RoundRobin

#: Makes a policy for one cluster, from that cluster's settings.
PolicyFactory = Callable[[random.Random, ClusterSettings], Policy]

POLICIES: Mapping[PolicyName, PolicyFactory] = {
    PolicyName.RANDOM: lambda rng, _: RandomPolicy(rng=rng),
    PolicyName.ROUND_ROBIN: lambda _rng, _: RoundRobin(),
    PolicyName.LEAST_REQUEST: lambda rng, _: LeastRequest(rng=rng),
    PolicyName.POWER_OF_TWO: lambda rng, _: PowerOfTwo(rng=rng),
    PolicyName.CONSISTENT_HASH: lambda rng, _: ConsistentHash(rng=rng),
    PolicyName.SESSION: lambda rng, _: Session(rng=rng),
    PolicyName.KV_AWARE: lambda rng, cluster: KvAware(rng=rng, settings=cluster.parameters.kv_aware),
    PolicyName.PREFIX_AFFINITY: lambda rng, cluster: PrefixAffinity(
        rng=rng, settings=cluster.parameters.prefix_affinity
    ),
    PolicyName.DYNAMO: lambda rng, cluster: Dynamo(rng=rng, settings=cluster.parameters.dynamo),
    PolicyName.LLM_D: lambda rng, cluster: LlmD(rng=rng, settings=cluster.parameters.llm_d),
    PolicyName.LMETRIC: lambda rng, _: LMetric(rng=rng),
    PolicyName.LEAST_TTFT: lambda rng, _: LeastTtft(rng=rng),
}


def configured(settings: ClusterSettings, name: PolicyName) -> Model | None:
    """The parameters that a policy of this name begins with in this cluster; None: it has none."""
    parameters: Model | None = getattr(settings.parameters, name.value, None)
    return parameters
