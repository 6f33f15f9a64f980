"""Every policy by its name in the configuration."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvproxy.config import schema
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

POLICIES: Mapping[schema.PolicyName, type[Policy]] = {
    schema.PolicyName.RANDOM: RandomPolicy,
    schema.PolicyName.ROUND_ROBIN: RoundRobin,
    schema.PolicyName.LEAST_REQUEST: LeastRequest,
    schema.PolicyName.POWER_OF_TWO: PowerOfTwo,
    schema.PolicyName.CONSISTENT_HASH: ConsistentHash,
    schema.PolicyName.SESSION: Session,
    schema.PolicyName.KV_AWARE: KvAware,
    schema.PolicyName.PREFIX_AFFINITY: PrefixAffinity,
    schema.PolicyName.DYNAMO: Dynamo,
    schema.PolicyName.LLM_D: LlmD,
    schema.PolicyName.LMETRIC: LMetric,
    schema.PolicyName.LEAST_TTFT: LeastTtft,
}


def make_policy(name: schema.PolicyName, settings: schema.ClusterSettings, *, rng: random.Random) -> Policy:
    """A fresh policy of this name, with the parameters it has in this cluster."""
    kind, parameters = POLICIES[name], configured(settings, name)
    return kind(rng=rng) if parameters is None else kind(rng=rng, settings=parameters)


def configured(settings: schema.ClusterSettings, name: schema.PolicyName) -> Model | None:
    """The parameters that a policy of this name begins with in this cluster; None: it has none."""
    parameters: Model | None = getattr(settings.parameters, name.value, None)
    return parameters
