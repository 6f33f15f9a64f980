"""prefix_affinity: follow the longest known prefix while the cluster is balanced.

The `cache_aware` policy of SGLang's router (now the Shepherd model gateway) and of vllm-router, with its thresholds:
when loads are far apart the least loaded endpoint is taken; otherwise the endpoint that holds the longest prefix, if
that is a large enough share of the prompt; otherwise the least loaded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvproxy.balancing.least import least, least_loaded
from kvproxy.balancing.policy import Candidate, Choice, PickRequest


class PrefixAffinity:
    """Longest prefix within balance thresholds. The defaults are the originals'."""

    def __init__(
        self,
        *,
        rng: Random,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        self._rng = rng
        self._cache_threshold = cache_threshold
        self._abs = balance_abs_threshold
        self._rel = balance_rel_threshold

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        loads = [candidate.load.in_flight for candidate in candidates]
        if max(loads) - min(loads) > self._abs and max(loads) > min(loads) * self._rel:
            return Choice(least_loaded(candidates, self._rng), "imbalanced")
        facts = request.facts
        matched = [facts.matched_tokens(candidate.id) for candidate in candidates]
        if facts.prompt_tokens == 0 or max(matched) / facts.prompt_tokens <= self._cache_threshold:
            return Choice(least_loaded(candidates, self._rng), "no_overlap")
        return Choice(least([-tokens for tokens in matched], self._rng), "overlap")
