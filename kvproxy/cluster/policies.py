"""Who decides in a cluster and who looks on, and what becomes of what they learned when others follow them."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.cluster.decision_metrics import DecisionMetrics
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.named_policies import NamedPolicies, NamedPolicy, named_policies
from kvproxy.cluster.shadow import Shadow, feed, shadow_of
from kvproxy.config.cluster_schema import ClusterSettings, PolicyName
from kvproxy.metrics.catalog import Metrics
from kvproxy.routing.forecast import Forecaster, speeds_of
from kvproxy.routing.policy import Learner, Policy
from kvproxy.routing.registry import POLICIES, configured
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.tuning import follow


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policy that counts and the shadow that does not."""

    policy: Policy
    shadow: Shadow | None
    counts: DecisionMetrics
    known: SpeedModel | None = None  # learned under earlier policies, where none of these learns speeds
    named: NamedPolicies | None = None  # that clients may ask for

    @property
    def speeds(self) -> SpeedModel | None:
        """What is being learned about the engines' speeds."""
        shadow = None if self.shadow is None else self.shadow.policy
        return speeds_of(self.policy, *(() if self.named is None else self.named.learners), shadow)

    @property
    def learners(self) -> Sequence[Learner | Shadow]:
        """Who is told of samples and reuse."""
        learners: list[Learner | Shadow] = [self.policy] if isinstance(self.policy, Learner) else []
        if self.named is not None:
            learners += self.named.learners
        return learners if self.shadow is None else [*learners, self.shadow]

    def hear(self, endpoint: Endpoint) -> None:
        """Samples of its load come here from now on, and nowhere else; not those of one that left for good."""
        endpoint.load.on_sample = None
        if not endpoint.metrics.closed:
            feed(endpoint.load, endpoint.id, self.learners)

    def forget(self, endpoint: Endpoint) -> None:
        """It left for good."""
        endpoint.load.on_sample = None
        if self.named is not None:
            self.named.forget(endpoint)
        elif isinstance(self.policy, Learner):
            self.policy.forget(endpoint.id)
        if self.shadow is not None:
            self.shadow.forget(endpoint)
        if self.known is not None:
            self.known.forget(endpoint.id)


class PolicyFactory:
    """Makes the deciders of one cluster, and those that follow them.

    A policy that stays keeps all it has. A new one that learns speeds goes on with what is known of them, be it from
    the policy before it, from the shadow, or from a policy of some time ago.
    """

    def __init__(self, cluster: str, *, metrics: Metrics, rng: random.Random) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._rng = rng

    def first(self, settings: ClusterSettings, policy: Policy | None = None) -> PolicySet:
        """As the settings say; `policy` in place of theirs."""
        if policy is None:
            policy = POLICIES[settings.policy](self._rng, settings)
        counts = self._counts(settings)
        return PolicySet(policy, self._shadow(settings), counts, None, self._named(settings, policy, counts))

    def next(self, before: PolicySet, old: ClusterSettings, new: ClusterSettings) -> PolicySet:
        """Those of the `new` settings, after `before`, which the `old` ones made."""
        known = before.speeds or before.known
        _follow(before, old, new)
        policy, shadow, counts = before.policy, before.shadow, before.counts
        if new.policy is not old.policy:
            policy, counts = POLICIES[new.policy](self._rng, new), self._counts(new)
            _teach(policy, known)
        if new.shadow_policy is not old.shadow_policy:
            shadow = self._shadow(new)
            if shadow is not None:
                _teach(shadow.policy, known)
        named = before.named
        if policy is not before.policy or new.client_policies != old.client_policies:
            named = self._named(new, policy, counts)
            for learner in () if named is None else named.learners:
                _teach(learner, known)
        return PolicySet(policy, shadow, counts, known, named)

    def _named(self, settings: ClusterSettings, policy: Policy, counts: DecisionMetrics) -> NamedPolicies | None:
        own = NamedPolicy(settings.policy.value, policy, counts)
        return named_policies(self._cluster, settings, own, metrics=self._metrics, rng=self._rng)

    def _shadow(self, settings: ClusterSettings) -> Shadow | None:
        return shadow_of(self._cluster, settings, metrics=self._metrics, rng=self._rng)

    def _counts(self, settings: ClusterSettings) -> DecisionMetrics:
        return DecisionMetrics(self._metrics, self._cluster, settings.policy.value)


def _follow(deciders: PolicySet, old: ClusterSettings, new: ClusterSettings) -> None:
    """Every policy takes the parameters that changed in the configuration, whatever its part."""
    present = {old.policy: deciders.policy}
    if deciders.named is not None:
        present |= {PolicyName(decider.name): decider.policy for decider in deciders.named.deciders.values()}
    parts = list(present.items())
    if deciders.shadow is not None and old.shadow_policy is not None:
        parts.append((old.shadow_policy, deciders.shadow.policy))
    for name, policy in parts:
        follow(policy, configured(old, name), configured(new, name))


def _teach(policy: object, known: SpeedModel | None) -> None:
    """A copy of its own, since policy and shadow each learn from every sample."""
    if known is not None and isinstance(policy, Forecaster):
        policy.speeds = copy.deepcopy(known)
