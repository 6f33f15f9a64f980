"""Policies by their names in the configuration, and its parameters: as configured, and as changed while it runs."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvproxy.base.installed import installed
from kvproxy.base.settings.model import Model
from kvproxy.cluster.feature import ClusterFeature
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.policy import Policy
from kvproxy.cluster.routing.simple import (
    LeastRequest,
    PowerOfTwo,
    PrefixAffinity,
    RandomPolicy,
    RoundRobin,
)
from kvproxy.cluster.settings import ClusterSettings, PolicyName

POLICIES: Mapping[PolicyName, type[Policy]] = {
    PolicyName.RANDOM: RandomPolicy,
    PolicyName.ROUND_ROBIN: RoundRobin,
    PolicyName.LEAST_REQUEST: LeastRequest,
    PolicyName.POWER_OF_TWO: PowerOfTwo,
    PolicyName.KV_AWARE: KvAware,
    PolicyName.PREFIX_AFFINITY: PrefixAffinity,
}


def policy_types() -> Mapping[PolicyName, type[Policy]]:
    """Return the core's, and those of installed features."""
    added = (feature.policy_types() for feature in installed(ClusterFeature))
    return {**POLICIES, **{name: kind for policies in added for name, kind in policies.items()}}


def make_policy(name: PolicyName, settings: ClusterSettings, *, rng: random.Random) -> Policy:
    """Return a fresh policy of this name, with the parameters it has in this cluster."""
    kind = policy_types()[name]
    parameters = configured(settings, name)
    return kind(rng=rng) if parameters is None else kind(rng=rng, settings=parameters)


def configured(settings: ClusterSettings, name: PolicyName) -> Model | None:
    """Return the parameters that a policy of this name begins with in this cluster; None: it has none."""
    parameters: Model | None = getattr(settings.parameters, name.value, None)
    return parameters


def runtime_overrides(policy: Policy, configured: Model | None) -> dict[str, object]:
    """Parameters that an operator changed while it ran: those that differ from what the configuration gives it."""
    if policy.settings is None or configured is None:
        return {}
    first = configured.model_dump()
    present = policy.settings.model_dump()
    return {name: value for name, value in present.items() if value != first[name]}


def merge_config(policy: Policy, before: Model | None, after: Model | None) -> None:
    """Apply parameters that changed in the configuration. An operator's changes at run time are kept otherwise; so are
    settings of another type than the configuration's."""
    if before is None or after is None:
        return
    if policy.settings is not None and isinstance(policy.settings, type(after)):
        old = before.model_dump()
        new = after.model_dump()
        changed = {name: value for name, value in new.items() if value != old[name]}
        policy.settings = policy.settings.model_copy(update=changed)
