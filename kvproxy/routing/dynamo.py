"""dynamo: the worker selection of NVIDIA Dynamo's KV router. dynamo_agentic: the same with its `--agentic` weights.

    cost = prefill_load_scale * max(0, prefill - credit) + live + active_request_weight * in_flight

In blocks: `prefill` is what the endpoint has pending and this whole prompt; `credit` what it holds of the prompt
(device 1 a block, times 1 / (1 + decay * excess), lower tiers 0.75), where `excess` is its pending prefill beyond the
least of all, in prompts like this one; `live` are the distinct blocks of the prompts in flight, with this one's added,
so that a prefix shared by live requests counts once. A temperature above 0 samples from the softmax of the negative
costs, scaled to their spread.

Sources, all of ai-dynamo/dynamo, under lib/kv-router/src: scheduling/selector/default.rs (cost, decay, softmax, ties)
at a4bdb9bfa1eed0afd4d67331f0938f9d5e3b58ed; sequences/prompt_registry.rs (live blocks: those active and those the
prompt adds) at 34e165bf6d6075e1d778c5b976b970442e6dd990 and sequences/single.rs (each counted once, to the end of its
last request) at 04df1c42f2fedff2286f46f13efcc96ec32a55bd. The preset: pull request 13447, open, commit 4841163c20.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from kvproxy.config.cluster_schema import DynamoAgenticSettings, DynamoSettings
from kvproxy.routing.policy import (
    LOWEST_COST,
    Candidate,
    Choice,
    LoadView,
    Overlap,
    OverlapFacts,
    PickRequest,
    Policy,
    least,
)

_NOTHING_HELD = Overlap(device_tokens=0)


class Dynamo(Policy):
    """Blocks to prefill plus blocks in use."""

    uses_overlap = True
    counts_live_blocks = True
    reasons = {**LOWEST_COST, "sampled": "drawn at random, in favour of low costs"}
    settings: DynamoSettings

    def __init__(self, *, rng: Random, settings: DynamoSettings = DynamoSettings()) -> None:
        super().__init__(rng=rng, settings=settings)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, settings = request.facts, self.settings
        prompt = facts.prompt_tokens
        least_pending = min(candidate.load.pending_tokens for candidate in candidates) if settings.credit_decay else 0
        in_whole_blocks = max(1, math.ceil(prompt / settings.block_size)) * settings.block_size
        costs = []
        for candidate in candidates:
            load = candidate.load
            overlap = facts.by_endpoint.get(candidate.id, _NOTHING_HELD)
            device = min(overlap.device_tokens, prompt)
            lower = min(overlap.lower_tokens, prompt - device)
            device_credit = settings.device_credit
            if settings.credit_decay:
                excess = (load.pending_tokens - least_pending) / in_whole_blocks
                device_credit /= 1.0 + settings.credit_decay * excess
            credit = device_credit * device + settings.lower_tier_credit * lower
            prefill = max(0.0, load.pending_tokens + prompt - credit)
            tokens = settings.prefill_load_scale * prefill + _live_tokens(load, facts)
            blocks = tokens / settings.block_size + settings.active_request_weight * load.in_flight
            costs.append(blocks / candidate.weight)
        if settings.temperature > 0.0:
            return Choice(self._sample(costs), "sampled", costs)
        return Choice(least(costs, self._rng), "lowest_cost", costs)

    def _sample(self, costs: Sequence[float]) -> int:
        lowest, spread = min(costs), max(costs) - min(costs)
        if spread == 0.0:
            return self._rng.randrange(len(costs))
        weights = [math.exp(-(cost - lowest) / spread / self.settings.temperature) for cost in costs]
        return self._rng.choices(range(len(costs)), weights)[0]


class DynamoAgentic(Dynamo):
    """The preset for agents: cached prefixes weigh more, and so does every request in flight."""

    def __init__(self, *, rng: Random, settings: DynamoAgenticSettings = DynamoAgenticSettings()) -> None:
        super().__init__(rng=rng, settings=settings)


def _live_tokens(load: LoadView, facts: OverlapFacts) -> float:
    """Of distinct blocks in flight there with this prompt's added. Where they are not counted, as on receipts of other
    policies, each request's tokens are taken for its own."""
    live = load.live_blocks
    if live is None:
        return load.resident_tokens + facts.prompt_tokens
    return (live + len(facts.blocks) - load.leading_live_blocks(facts.blocks)) * facts.block_tokens
