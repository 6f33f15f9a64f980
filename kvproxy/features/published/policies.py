"""Policies rebuilt from published schedulers, NVIDIA Dynamo's and llm-d's, to compare with.

dynamo: the worker selection of NVIDIA Dynamo's KV router. dynamo_agentic: the same with its `--agentic` weights.

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

llm_d: weighted scorers of the llm-d inference scheduler in its precise prefix-cache configuration, which its guides
had until 2026. llm_d_sticky: what they have since, prefix-cache affinity until saturated, then least token load.

    llm_d          score = 2 * prefix + 1 * queue + 1 * kv
    llm_d_sticky   of the endpoints that hold 0.80 of the prompt or more, unless the best of them would take 18 s longer
                   than the best other one, else of all: the least uncached tokens in flight, this prompt's included

`prefix`: matched tokens from the least to the most that any holder holds; `queue`: waiting requests likewise, fewest
best; `kv`: share of KV memory that is free. How long an endpoint takes is its uncached tokens without a first token at
peak throughput. The originals scrape queue and memory from the engines; here both are counted at the router.

Sources: llm-d/llm-d-inference-scheduler deploy/config/epp-precise-prefix-cache-config.yaml at
17d999e09becdfc2f4bf9b26bad49b289036d4ca and pkg/plugins/scorer/utils.go at 2202f3ca54371e64d835b2257a4bb802b2184ecb;
llm-d/llm-d-router pkg/epp/framework/plugins/scheduling: scorer/queuedepth/queue.go at
2342697faf4e5a1a3ebf5e95d9ca5c903ba64c4a, filter/prefixcacheaffinity/plugin.go at
066c20ea107e538797d3256ab0803a4f50625975, scorer/tokenload/token_load.go at 1b30d10f8006063abca0bc13c18920833eb50a51;
llm-d/llm-d guides/precise-prefix-cache-routing/router/precise-prefix-cache-routing.values.yaml at
8052f2209e2976ba5213e56bde50255fc73badce. Without any configuration llm-d-router weighs 3, 2 and 2 and takes the matched
share of the prompt for `prefix` (pkg/epp/config/loader/defaults.go at 0b59e4edb532ede6338d2ced835b3e09cedfdcaf).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from kvproxy.cluster.routing.costs import LOWEST_COST, least
from kvproxy.cluster.routing.policy import Candidate, Choice, LoadView, Overlap, OverlapFacts, PickRequest, Policy
from kvproxy.features.published.settings import DynamoAgenticSettings, DynamoSettings, LlmDSettings, LlmDStickySettings

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
        facts = request.facts
        settings = self.settings
        prompt = facts.prompt_tokens
        least_pending = min(candidate.load.pending_tokens for candidate in candidates) if settings.credit_decay else 0
        in_whole_blocks = max(1, math.ceil(prompt / settings.block_size)) * settings.block_size
        costs = []
        for candidate in candidates:
            load = candidate.load
            overlap = facts.by_endpoint.get(candidate.id, _NOTHING_HELD)
            device = min(overlap.device_tokens, prompt)
            lower = min(overlap.lower_tokens, prompt - device) if overlap.lower else 0
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
        lowest = min(costs)
        spread = max(costs) - min(costs)
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
    live = load.live
    if live is None:
        return load.resident_tokens + facts.prompt_tokens
    return (len(live) + len(facts.blocks) - live.count_leading(facts.blocks)) * facts.block_tokens


class LlmD(Policy):
    """Highest weighted sum of normalised scores; ties at random."""

    uses_overlap = True
    counts_live_blocks = True
    reasons = {"highest_score": "its score is the highest"}
    settings: LlmDSettings

    def __init__(self, *, rng: Random, settings: LlmDSettings = LlmDSettings()) -> None:
        super().__init__(rng=rng, settings=settings)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        settings = self.settings
        costs = []
        prefix = _prefix_scores([facts.matched_tokens(candidate.id) for candidate in candidates])
        queue = _queue_scores([candidate.load.pending_requests for candidate in candidates])
        for candidate, prefix_score, queue_score in zip(candidates, prefix, queue, strict=True):
            free = 1.0 - min(1.0, _used_tokens(candidate.load, facts) / settings.kv_capacity_tokens)
            score = (
                settings.prefix_weight * prefix_score + settings.queue_weight * queue_score + settings.kv_weight * free
            )
            costs.append(-score)
        return Choice(least(costs, self._rng), "highest_score", costs)


class LlmDSticky(Policy):
    """Sticks to the endpoints that hold most of the prompt until they are saturated."""

    uses_overlap = True
    reasons = {**LOWEST_COST, "sticky": "of those that hold most of the prompt it has the least to do"}
    settings: LlmDStickySettings

    def __init__(self, *, rng: Random, settings: LlmDStickySettings = LlmDStickySettings()) -> None:
        super().__init__(rng=rng, settings=settings)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        settings = self.settings
        matched = [facts.matched_tokens(candidate.id) for candidate in candidates]
        pending = [candidate.load.pending_tokens for candidate in candidates]
        costs = [float(tokens + facts.prompt_tokens - held) for tokens, held in zip(pending, matched, strict=True)]
        enough = settings.affinity_threshold * facts.prompt_tokens
        sticky = [index for index, held in enumerate(matched) if held and held >= enough]
        others = [tokens for index, tokens in enumerate(pending) if index not in sticky]
        if sticky and others:
            penalty_s = (min(pending[index] for index in sticky) - min(others)) / settings.peak_prefill_tokens_per_s
            if penalty_s > settings.max_penalty_s:
                sticky = []
        if not sticky:
            return Choice(least(costs, self._rng), "lowest_cost", costs)
        index = sticky[least([costs[index] for index in sticky], self._rng)]
        return Choice(index, "sticky", costs)


def _prefix_scores(matched: Sequence[int]) -> list[float]:
    """Each holder's place between the one that holds least (0) and the one that holds most (1); all alike: 1."""
    held = [tokens for tokens in matched if tokens]
    if not held:
        return [0.0] * len(matched)
    low = min(held)
    high = max(held)
    if low == high:
        return [1.0 if tokens else 0.0 for tokens in matched]
    return [(tokens - low) / (high - low) if tokens else 0.0 for tokens in matched]


def _queue_scores(waiting: Sequence[int]) -> list[float]:
    """From the longest queue (0) to the shortest (1); all alike: 1."""
    low = min(waiting)
    high = max(waiting)
    return [1.0 if low == high else (high - requests) / (high - low) for requests in waiting]


def _used_tokens(load: LoadView, facts: OverlapFacts) -> float:
    """Of KV memory: what is shared is held once."""
    live = load.live
    return load.resident_tokens if live is None else len(live) * facts.block_tokens
