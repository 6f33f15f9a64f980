"""Policies of one cluster that a client may ask for by name, beside the cluster's own.

All look at the same endpoints with the same load ledgers, and those that go by prefill speeds share what is learned of
them; only a policy's private memory (whose turn it is, which session went where) is its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvproxy.cluster.decision_metrics import DecisionMetrics
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.cluster_schema import ClusterSettings
from kvproxy.metrics.catalog import Metrics
from kvproxy.routing.forecast import Forecaster
from kvproxy.routing.policy import Learner, Onlooker, PickRequest, Policy
from kvproxy.routing.registry import POLICIES


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy under its name, and what it decided."""

    name: str
    policy: Policy
    counts: DecisionMetrics


@dataclass(frozen=True, slots=True)
class NamedPolicies:
    """`deciders` by name, the cluster's own among them."""

    deciders: Mapping[str, NamedPolicy]
    learners: Sequence[Learner]  # those that do not learn through the cluster's own policy already

    def tell(self, chosen: NamedPolicy, request: PickRequest, endpoint: Endpoint, endpoints: int, now: float) -> None:
        """`chosen` placed a request; the others that count placements hear of it."""
        for decider in self.deciders.values():
            if decider.policy is not chosen.policy and isinstance(decider.policy, Onlooker):
                decider.policy.placed(request, endpoint.id, endpoints, now)

    def forget(self, endpoint: Endpoint) -> None:
        """It left for good; also for those that share what another learns, since what they count is their own."""
        for decider in self.deciders.values():
            if isinstance(decider.policy, Learner):
                decider.policy.forget(endpoint.id)


def named_policies(
    cluster: str, settings: ClusterSettings, own: NamedPolicy, *, metrics: Metrics, rng: random.Random
) -> NamedPolicies | None:
    """What these settings let clients ask for; None: nothing."""
    deciders, learners = {own.name: own}, []
    speeds = own.policy.speeds if isinstance(own.policy, Forecaster) else None
    for name in settings.client_policies:
        if name.value in deciders:
            continue
        policy = POLICIES[name](rng, settings)
        if isinstance(policy, Forecaster) and speeds is not None:
            policy.speeds = speeds
        elif isinstance(policy, Learner):
            learners.append(policy)
            speeds = policy.speeds if isinstance(policy, Forecaster) else speeds
        deciders[name.value] = NamedPolicy(name.value, policy, DecisionMetrics(metrics, cluster, name.value))
    return NamedPolicies(deciders, learners) if settings.client_policies else None
