"""lmetric: uncached pending tokens times batch size, the product of the LMetric paper on LLM request scheduling.

    cost = (pending uncached tokens + this request's) * (requests in flight + 1)

Nothing to tune and nothing learned: the peer that is hardest to beat.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.routing.costs import LOWEST_COST, least
from kvproxy.routing.policy import Candidate, Choice, PickRequest, Policy


class LMetric(Policy):
    """Least product of prefill tokens and batch."""

    uses_overlap = True
    reasons = LOWEST_COST

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        costs = []
        for candidate in candidates:
            load = candidate.load
            uncached = facts.prompt_tokens - facts.matched_tokens(candidate.id)
            costs.append((load.pending_tokens + uncached) * (load.in_flight + 1) / candidate.weight)
        return Choice(least(costs, self._rng), "lowest_cost", costs)
