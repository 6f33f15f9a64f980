"""Every policy by its name in the configuration."""

from __future__ import annotations

import random
from collections.abc import Mapping

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

POLICIES: Mapping[PolicyName, type[Policy]] = {
    PolicyName.RANDOM: RandomPolicy,
    PolicyName.ROUND_ROBIN: RoundRobin,
    PolicyName.LEAST_REQUEST: LeastRequest,
    PolicyName.POWER_OF_TWO: PowerOfTwo,
    PolicyName.CONSISTENT_HASH: ConsistentHash,
    PolicyName.SESSION: Session,
    PolicyName.KV_AWARE: KvAware,
    PolicyName.PREFIX_AFFINITY: PrefixAffinity,
    PolicyName.DYNAMO: Dynamo,
    PolicyName.LLM_D: LlmD,
    PolicyName.LMETRIC: LMetric,
    PolicyName.LEAST_TTFT: LeastTtft,
}


def make_policy(name: PolicyName, settings: ClusterSettings, *, rng: random.Random) -> Policy:
    """A fresh policy of this name, with the parameters it has in this cluster."""
    kind, parameters = POLICIES[name], configured(settings, name)
    return kind(rng=rng) if parameters is None else kind(rng=rng, settings=parameters)


def configured(settings: ClusterSettings, name: PolicyName) -> Model | None:
    """The parameters that a policy of this name begins with in this cluster; None: it has none."""
    parameters: Model | None = getattr(settings.parameters, name.value, None)
    return parameters
