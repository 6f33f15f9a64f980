"""prefix_affinity: follow the longest known prefix while the cluster is balanced.

The `cache_aware` policy of SGLang's router (now the Shepherd model gateway) and of vllm-router, with its thresholds:
when loads are far apart the least loaded endpoint is taken; otherwise the endpoint that holds the longest prefix, if
that is a large enough share of the prompt; otherwise the least loaded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvproxy.config.cluster_schema import PrefixAffinitySettings
from kvproxy.routing.costs import least, least_loaded
from kvproxy.routing.policy import Candidate, Choice, PickRequest, Policy


class PrefixAffinity(Policy):
    """Longest prefix within balance thresholds."""

    uses_overlap = True
    reasons = {
        "overlap": "no other endpoint holds more of this prompt",
        "no_overlap": "no endpoint is known to hold any of this prompt",
        "imbalanced": "the loads are far apart, so the least loaded was taken",
    }
    settings: PrefixAffinitySettings

    def __init__(self, *, rng: Random, settings: PrefixAffinitySettings = PrefixAffinitySettings()) -> None:
        super().__init__(rng=rng, settings=settings)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        loads = [candidate.load.in_flight for candidate in candidates]
        settings, busiest, idlest = self.settings, max(loads), min(loads)
        if busiest - idlest > settings.balance_abs_threshold and busiest > idlest * settings.balance_rel_threshold:
            return Choice(least_loaded(candidates, self._rng), "imbalanced")
        facts = request.facts
        matched = [facts.matched_tokens(candidate.id) for candidate in candidates]
        if facts.prompt_tokens == 0 or max(matched) / facts.prompt_tokens <= settings.cache_threshold:
            return Choice(least_loaded(candidates, self._rng), "no_overlap")
        return Choice(least([-tokens for tokens in matched], self._rng), "overlap")
