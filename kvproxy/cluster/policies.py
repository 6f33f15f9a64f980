"""The policies of one cluster: its own, those that clients may ask for by name, and those without effect."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from functools import partial

from kvproxy.base.installed import installed
from kvproxy.base.metrics.collectors import CounterCell
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, LowerTokens
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.feature import ClusterFeature, SilentPolicy
from kvproxy.cluster.metrics import RoutingMetrics
from kvproxy.cluster.routing.policy import Policy
from kvproxy.cluster.routing.registry import make_policy
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Features
from kvproxy.cluster.settings import ClusterSettings, PolicyName


class NamedPolicy:
    """A policy under its name, and counts of what it decided, without looking labels up for every request."""

    def __init__(self, name: str, policy: Policy, *, cluster: str, metrics: Metrics) -> None:
        self.name = name
        self.policy = policy
        self._picks = partial(metrics.group(RoutingMetrics).picks.labels, cluster, name)
        self._counts: dict[str, CounterCell] = {}  # by reason: closed sets of the policy, the selector and the cluster

    def count_result(self, reason: str) -> None:
        """Count a placement or a refusal."""
        counter = self._counts.get(reason)
        if counter is None:
            counter = self._counts[reason] = self._picks(reason)
        counter.value += 1.0


class PolicySet:
    """All look at the same endpoints with the same load ledgers; only a policy's private memory is its own.

    The cluster's own policy and the named ones share what is learned of prefill speeds, so that it is learned once from
    each sample; a silent one learns in a state of its own. `earlier` is the set under the settings before a reload: a
    policy that both have goes on as it is, with its sessions, its samples and what an operator tuned about it; a new
    one that learns speeds goes on with what is known of them, also from a policy of some time ago.
    """

    def __init__(
        self,
        cluster: str,
        settings: ClusterSettings,
        *,
        metrics: Metrics,
        rng: random.Random,
        policy: Policy | None = None,
        earlier: PolicySet | None = None,
    ) -> None:
        """`policy` in place of that of the settings."""
        self._cluster = cluster
        self._settings = settings
        self._metrics = metrics
        self._rng = rng
        #: Speeds of earlier policies, kept if none of these learns any.
        self._known: SpeedModel | None = None if earlier is None else earlier.speeds or earlier._known
        self._preferences: dict[str, CounterCell] = {}
        self.own: NamedPolicy
        same_policy = earlier is not None and earlier._settings.policy is settings.policy
        if earlier is not None and same_policy:
            self.own = earlier.own
        else:
            policy = make_policy(settings.policy, rng=rng) if policy is None else policy
            self.own = self._counted(settings.policy, self._taught(policy))
        #: Policies without effect, by the feature that runs each and their name.
        self.silent: Mapping[tuple[str, PolicyName], SilentPolicy] = self._find_silent(
            {} if earlier is None else earlier.silent
        )
        self._silent = tuple(self.silent.values())
        #: What clients may ask for, the cluster's own among them; empty where they may not.
        self.named: Mapping[str, NamedPolicy]
        if earlier is not None and same_policy and earlier._settings.client_policies == settings.client_policies:
            self.named = earlier.named
        else:
            self.named = self._named(settings)
        self._deciding: Sequence[Policy] = ()  # all but the silent ones
        self._learners: Sequence[Policy] = ()  # of these, each model of speeds once
        #: What the policies that decide have learned of the engines' speeds; None where none of them learns any.
        self.deciding_speeds: SpeedModel | None = None
        #: Whether one of them, silent ones included, asks loads for live blocks.
        self.counts_live_blocks = False
        #: Whether one of them, silent ones included, wants to hear what engines reused.
        self.observes_reuse = False
        #: The same speeds, or what a silent one has learned.
        self.speeds: SpeedModel | None = None
        self._list_policies()

    def find_policy(self, name: str) -> NamedPolicy:
        """Return the policy that a request names, if clients may choose it; otherwise the cluster's own."""
        return self.named.get(name, self.own)

    def placed(self, decision: Decision[Endpoint], now: float) -> None:
        """Apply the decision: count it, let silent policies decide, and pass it to every policy."""
        request = decision.request
        candidates = decision.candidates
        index = decision.index
        by = decision.decided_by
        (self.find_policy(request.policy) if request.policy else self.own).count_result(decision.reason)
        if decision.preference is not None:
            self._count_preference(decision.preference)
        for silent in self._silent:
            silent.decide(decision, now)
        if self.speeds is not None:
            self.speeds.requests_without_sample += 1
        for policy in self._deciding:
            policy.placed(request, candidates, index, now, choice=decision.choice if policy is by else None)

    def observe_sample(
        self,
        endpoint: EndpointId,
        work: Features,
        busy_s: float,
        now: float,
        *,
        lower: LowerTokens = (),
        scraped: bool = False,
    ) -> None:
        """Pass a sample to each speed model once, as in Policy."""
        for policy in self._learners:
            policy.observe_sample(endpoint, work, busy_s, now, lower=lower, scraped=scraped)
        for silent in self._silent:
            silent.learn(
                lambda policy: policy.observe_sample(endpoint, work, busy_s, now, lower=lower, scraped=scraped)
            )

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        for policy in self._learners:
            policy.observe_reuse(endpoint, predicted_tokens, cached_tokens, now)
        for silent in self._silent:
            silent.learn(lambda policy: policy.observe_reuse(endpoint, predicted_tokens, cached_tokens, now))

    def placed_elsewhere(
        self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, endpoints: int, now: float
    ) -> None:
        for policy in self._deciding:
            policy.placed_elsewhere(endpoint, routed_s, requests, bound, endpoints, now)

    def forget_endpoint(self, endpoint: EndpointId) -> None:
        """Forget an endpoint in every policy, also in those that share speeds, since their other counts are their
        own."""
        for policy in self._deciding:
            policy.forget(endpoint)
        for silent in self._silent:
            silent.learn(lambda policy: policy.forget(endpoint))
        if self._known is not None:
            self._known.forget(endpoint)

    def _list_policies(self) -> None:
        self._deciding = tuple(each.policy for each in self.named.values()) or (self.own.policy,)
        sharing = {id(policy.speeds): policy for policy in reversed(self._deciding) if policy.speeds is not None}
        self._learners = tuple(
            policy for policy in self._deciding if policy.speeds is None or sharing[id(policy.speeds)] is policy
        )
        every = (*self._deciding, *(silent.policy for silent in self._silent))
        self.deciding_speeds = next((policy.speeds for policy in self._deciding if policy.speeds is not None), None)
        self.speeds = next((policy.speeds for policy in every if policy.speeds is not None), None)
        self.counts_live_blocks = any(policy.counts_live_blocks for policy in every)
        #: Whether one of them weighs what endpoints hold of a prompt.
        self.uses_overlap = any(policy.uses_overlap for policy in every)
        self.observes_reuse = any(type(policy).observe_reuse is not Policy.observe_reuse for policy in every)

    def _counted(self, name: PolicyName, policy: Policy) -> NamedPolicy:
        return NamedPolicy(name.value, policy, cluster=self._cluster, metrics=self._metrics)

    def _count_preference(self, result: str) -> None:
        counter = self._preferences.get(result)
        if counter is None:
            counter = self._preferences[result] = self._metrics.group(RoutingMetrics).preferences.labels(result)
        counter.value += 1.0

    def _taught(self, policy: Policy) -> Policy:
        """Give the policy a copy of the learned speeds, since live and silent policies each learn from every sample."""
        if self._known is not None and policy.learns_speeds:
            policy.speeds = copy.deepcopy(self._known)
        return policy

    def _find_silent(
        self, earlier: Mapping[tuple[str, PolicyName], SilentPolicy]
    ) -> dict[tuple[str, PolicyName], SilentPolicy]:
        """Return the earlier ones that stay, and new ones; their draws of chance take one number of the sequence."""
        found = {}
        for feature in installed(ClusterFeature):
            name = feature.find_silent_policy(self._settings)
            if name is None:
                continue
            silent = earlier.get((feature.name, name))
            if silent is None:
                policy = make_policy(name, rng=random.Random(self._rng.random()))
                policy = self._taught(policy)
                silent = feature.follow_decisions(name, policy, cluster=self._cluster, metrics=self._metrics)
            found[feature.name, name] = silent
        return found

    def _named(self, settings: ClusterSettings) -> Mapping[str, NamedPolicy]:
        if not settings.client_policies:
            return {}
        named = {self.own.name: self.own}
        speeds = self.own.policy.speeds
        for name in settings.client_policies:
            if name.value in named:
                continue
            policy = make_policy(name, rng=self._rng)
            if policy.learns_speeds:
                if speeds is None:
                    speeds = self._taught(policy).speeds
                policy.speeds = speeds
            named[name.value] = self._counted(name, policy)
        return named
