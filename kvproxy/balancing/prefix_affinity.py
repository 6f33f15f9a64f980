"""prefix_affinity: follow the longest known prefix while the cluster is balanced.

The `cache_aware` policy of SGLang's router (now the Shepherd model gateway) and of vllm-router, with its thresholds:
when loads are far apart the least loaded endpoint is taken; otherwise the endpoint that holds the longest prefix, if
that is a large enough share of the prompt; otherwise the least loaded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pydantic import Field

from kvproxy.balancing.least import least, least_loaded
from kvproxy.balancing.policy import Candidate, Choice, PickRequest
from kvproxy.config.model import Fraction, Model


class PrefixAffinitySettings(Model):
    """Thresholds. The defaults are the originals'."""

    cache_threshold: Fraction = 0.3
    """Share of the prompt that must be known somewhere for the prefix to decide."""
    balance_abs_threshold: int = Field(default=64, ge=0, le=100_000)
    """Requests in flight the busiest endpoint may be ahead of the idlest, before load decides..."""
    balance_rel_threshold: float = Field(default=1.5, ge=1, le=1000)
    """...if it is also ahead by this factor."""


class PrefixAffinity:
    """Longest prefix within balance thresholds."""

    def __init__(self, *, rng: Random, settings: PrefixAffinitySettings = PrefixAffinitySettings()) -> None:
        self.settings = settings
        self._rng = rng

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
