"""llm_d: weighted scorers of the llm-d inference scheduler in its precise prefix-cache configuration, which its guides
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

from collections.abc import Sequence
from random import Random

from kvproxy.config.cluster_schema import LlmDSettings, LlmDStickySettings
from kvproxy.routing.policy import LOWEST_COST, Candidate, Choice, LoadView, OverlapFacts, PickRequest, Policy, least


class LlmD(Policy):
    """Highest weighted sum of normalised scores; ties at random."""

    uses_overlap = True
    counts_live_blocks = True
    reasons = {"highest_score": "its score is the highest"}
    settings: LlmDSettings

    def __init__(self, *, rng: Random, settings: LlmDSettings = LlmDSettings()) -> None:
        super().__init__(rng=rng, settings=settings)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, settings, costs = request.facts, self.settings, []
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
        facts, settings = request.facts, self.settings
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
    low, high = min(held), max(held)
    if low == high:
        return [1.0 if tokens else 0.0 for tokens in matched]
    return [(tokens - low) / (high - low) if tokens else 0.0 for tokens in matched]


def _queue_scores(waiting: Sequence[int]) -> list[float]:
    """From the longest queue (0) to the shortest (1); all alike: 1."""
    low, high = min(waiting), max(waiting)
    return [1.0 if low == high else (high - requests) / (high - low) for requests in waiting]


def _used_tokens(load: LoadView, facts: OverlapFacts) -> float:
    """Of KV memory: what is shared is held once."""
    live = load.live_blocks
    return load.resident_tokens if live is None else live * facts.block_tokens
