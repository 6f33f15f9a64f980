"""llm_d: weighted scorers of the llm-d inference scheduler in its precise prefix-cache configuration.

    score = 2 * prefix + 1 * queue + 1 * kv

`prefix`: matched tokens from the least to the most any endpoint holds; `queue`: waiting requests likewise, fewest best;
`kv`: share of KV memory that is free. The original scrapes queue and memory from the engines; here both are counted at
the router, waiting requests as those without a first token and memory as tokens of live sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvproxy.config.policy_schema import LlmDSettings
from kvproxy.routing.costs import least
from kvproxy.routing.policy import Candidate, Choice, PickRequest, Policy


class LlmD(Policy):
    """Highest weighted sum of normalised scores; ties at random."""

    uses_overlap = True
    reasons = {"highest_score": "its score is the highest"}
    settings: LlmDSettings

    def __init__(self, *, rng: Random, settings: LlmDSettings = LlmDSettings()) -> None:
        super().__init__(rng=rng, settings=settings)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        prefix = _rising([request.facts.matched_tokens(candidate.id) for candidate in candidates], when_equal=0.0)
        queue = _rising([-candidate.load.pending_requests for candidate in candidates], when_equal=1.0)
        settings, costs = self.settings, []
        for candidate, prefix_score, queue_score in zip(candidates, prefix, queue, strict=True):
            free = 1.0 - min(1.0, candidate.load.resident_tokens / settings.kv_capacity_tokens)
            score = (
                settings.prefix_weight * prefix_score + settings.queue_weight * queue_score + settings.kv_weight * free
            )
            costs.append(-score)
        return Choice(least(costs, self._rng), "highest_score", costs)


def _rising(values: Sequence[int], *, when_equal: float) -> list[float]:
    """Each value's place between the lowest (0) and the highest (1)."""
    low, high = min(values), max(values)
    if low == high:
        return [when_equal] * len(values)
    return [(value - low) / (high - low) for value in values]
