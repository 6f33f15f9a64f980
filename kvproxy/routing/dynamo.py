"""dynamo: the default worker selection of NVIDIA Dynamo's KV router.

    cost = prefill_load_scale * prefill_blocks + decode_blocks

`prefill_blocks` are the prompt tokens an endpoint still has to compute, this request's included, less credits for what
it holds (device 1, lower tiers 0.75 of a block); `decode_blocks` those of its live sequences. A temperature above 0
samples from the softmax of the negative costs, scaled to their spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from kvproxy.config.policy_schema import DynamoSettings
from kvproxy.routing.costs import LOWEST_COST, least
from kvproxy.routing.policy import Candidate, Choice, Overlap, PickRequest, Policy

_NOTHING_HELD = Overlap(device_tokens=0)


class Dynamo(Policy):
    """Blocks to prefill plus blocks in use."""

    uses_overlap = True
    reasons = {**LOWEST_COST, "sampled": "drawn at random, in favour of low costs"}
    settings: DynamoSettings

    def __init__(self, *, rng: Random, settings: DynamoSettings = DynamoSettings()) -> None:
        super().__init__(rng=rng, settings=settings)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, settings = request.facts, self.settings
        costs = []
        for candidate in candidates:
            load = candidate.load
            overlap = facts.by_endpoint.get(candidate.id, _NOTHING_HELD)
            device = min(overlap.device_tokens, facts.prompt_tokens)
            lower = min(overlap.lower_tokens, facts.prompt_tokens - device)
            credit = settings.device_credit * device + settings.lower_tier_credit * lower
            prefill = max(0.0, load.pending_tokens + facts.prompt_tokens - credit)
            tokens = settings.prefill_load_scale * prefill + load.resident_tokens + facts.prompt_tokens
            costs.append(tokens / settings.block_size / candidate.weight)
        if settings.temperature > 0.0:
            return Choice(self._sample(costs), "sampled", costs)
        return Choice(least(costs, self._rng), "lowest_cost", costs)

    def _sample(self, costs: Sequence[float]) -> int:
        lowest, spread = min(costs), max(costs) - min(costs)
        if spread == 0.0:
            return self._rng.randrange(len(costs))
        weights = [math.exp(-(cost - lowest) / spread / self.settings.temperature) for cost in costs]
        return self._rng.choices(range(len(costs)), weights)[0]
