"""Policies rebuilt from published schedulers, to compare with: NVIDIA Dynamo's and llm-d's, the LMetric paper's and
Mooncake's (each described by its class).

dynamo: the worker selection of NVIDIA Dynamo's KV router. dynamo_agentic: the same with its `--agentic` weights.

    cost = prefill_load_scale * max(0, prefill - credit) + live + active_request_weight * in_flight

In blocks: `prefill` is what the endpoint has pending and this whole prompt; `credit` what it holds of the prompt
(`device_credit` a block, lower tiers 0.75); `live` are the distinct blocks of the prompts in flight, with this one's
added, so that a prefix shared by live requests counts once. Neither the original's defaults nor its preset let the
credit decay or draw by a temperature.

Sources, all of ai-dynamo/dynamo, under lib/kv-router/src: scheduling/selector/default.rs (cost, ties)
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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.costs import LOWEST_COST, least, least_loaded, own_s
from kvproxy.cluster.routing.policy import Candidate, Choice, LoadView, Overlap, OverlapFacts, PickRequest, Policy
from kvproxy.cluster.routing.speeds import SpeedModel

_NOTHING_HELD = Overlap(device_tokens=0)
BLOCK_TOKENS = 16
#: Thresholds of the originals of PrefixAffinity: load decides once the busiest endpoint is this many requests ahead of
#: the idlest, and by this factor; else the prefix, where more than this share of the prompt is known.
_AHEAD = 64
_TIMES = 1.5
_KNOWN_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class DynamoWeights:
    """Weights of the cost: the original's defaults."""

    prefill_load_scale: float = 1.0  # of blocks to prefill against live blocks
    device_credit: float = 1.0  # blocks to prefill that one in engine memory saves
    lower_tier_credit: float = 0.75
    active_request_weight: float = 0.0  # blocks that each request in flight counts as, besides its own


class Dynamo(Policy):
    """Blocks to prefill plus blocks in use."""

    uses_overlap = True
    counts_live_blocks = True
    reasons = LOWEST_COST

    def __init__(self, *, rng: Random, weights: DynamoWeights = DynamoWeights()) -> None:
        super().__init__(rng=rng)
        self._weights = weights

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        weights = self._weights
        prompt = facts.prompt_tokens
        costs = []
        for candidate in candidates:
            load = candidate.load
            overlap = facts.by_endpoint.get(candidate.id, _NOTHING_HELD)
            device = min(overlap.device_tokens, prompt)
            lower = min(overlap.lower_tokens, prompt - device) if overlap.lower else 0
            credit = weights.device_credit * device + weights.lower_tier_credit * lower
            prefill = max(0.0, load.pending_tokens + prompt - credit)
            tokens = weights.prefill_load_scale * prefill + _live_tokens(load, facts)
            blocks = tokens / BLOCK_TOKENS + weights.active_request_weight * load.in_flight
            costs.append(blocks / candidate.weight)
        return Choice(least(costs, self._rng), "lowest_cost", costs)


class DynamoAgentic(Dynamo):
    """The preset for agents: cached prefixes weigh more, and so does every request in flight."""

    def __init__(self, *, rng: Random) -> None:
        weights = DynamoWeights(prefill_load_scale=4.0, device_credit=2.0, active_request_weight=64.0)
        super().__init__(rng=rng, weights=weights)


def _live_tokens(load: LoadView, facts: OverlapFacts) -> float:
    """Of distinct blocks in flight there with this prompt's added. Where they are not counted, as on receipts of other
    policies, each request's tokens are taken for its own."""
    live = load.live
    if live is None:
        return load.resident_tokens + facts.prompt_tokens
    return (len(live) + len(facts.blocks) - live.count_leading(facts.blocks)) * facts.block_tokens


@dataclass(frozen=True, slots=True)
class LlmDWeights:
    """Weights of the score, and what it takes for an endpoint's KV memory."""

    prefix: float = 2.0
    queue: float = 1.0
    kv: float = 1.0
    kv_capacity_tokens: int = 800_000


class LlmD(Policy):
    """Highest weighted sum of normalised scores; ties at random."""

    uses_overlap = True
    counts_live_blocks = True
    reasons = {"highest_score": "its score is the highest"}

    def __init__(self, *, rng: Random, weights: LlmDWeights = LlmDWeights()) -> None:
        super().__init__(rng=rng)
        self._weights = weights

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        weights = self._weights
        costs = []
        prefix = _prefix_scores([facts.matched_tokens(candidate.id) for candidate in candidates])
        queue = _queue_scores([candidate.load.pending_requests for candidate in candidates])
        for candidate, prefix_score, queue_score in zip(candidates, prefix, queue, strict=True):
            free = 1.0 - min(1.0, _used_tokens(candidate.load, facts) / weights.kv_capacity_tokens)
            costs.append(-(weights.prefix * prefix_score + weights.queue * queue_score + weights.kv * free))
        return Choice(least(costs, self._rng), "highest_score", costs)


#: Share of the prompt that an endpoint must hold for a request to stick to it.
AFFINITY_THRESHOLD = 0.8


class LlmDSticky(Policy):
    """Sticks to the endpoints that hold most of the prompt until they are saturated."""

    uses_overlap = True
    reasons = {**LOWEST_COST, "sticky": "of those that hold most of the prompt it has the least to do"}

    def __init__(self, *, rng: Random, max_penalty_s: float = 18.0, peak_tokens_per_s: float = 15_928.0) -> None:
        """`peak_tokens_per_s`: prefill of an engine at most; the original's default is that of Qwen 32B on two H100."""
        super().__init__(rng=rng)
        self._max_penalty_s = max_penalty_s
        self._peak_tokens_per_s = peak_tokens_per_s

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        matched = [facts.matched_tokens(candidate.id) for candidate in candidates]
        pending = [candidate.load.pending_tokens for candidate in candidates]
        costs = [float(tokens + facts.prompt_tokens - held) for tokens, held in zip(pending, matched, strict=True)]
        enough = AFFINITY_THRESHOLD * facts.prompt_tokens
        sticky = [index for index, held in enumerate(matched) if held and held >= enough]
        others = [tokens for index, tokens in enumerate(pending) if index not in sticky]
        if sticky and others:
            penalty_s = (min(pending[index] for index in sticky) - min(others)) / self._peak_tokens_per_s
            if penalty_s > self._max_penalty_s:
                sticky = []
        if not sticky:
            return Choice(least(costs, self._rng), "lowest_cost", costs)
        index = sticky[least([costs[index] for index in sticky], self._rng)]
        return Choice(index, "sticky", costs)


class LMetric(Policy):
    """Uncached pending tokens times batch size, the product of the LMetric paper on LLM request scheduling.

        cost = (pending uncached tokens + this request's) * (requests in flight + 1)

    Nothing to tune and nothing learned: the peer that is hardest to beat.
    """

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


class LeastTtft(Policy):
    """Greedy by estimated time to first token, as Mooncake's Conductor schedules.

        cost = wait + slowness * own

    The same ledger and the same learned speeds as kv_aware, without what makes that one look further than this request.
    """

    uses_overlap = True
    learns_speeds = True
    reasons = LOWEST_COST
    speeds: SpeedModel

    def __init__(self, *, rng: Random, speeds: SpeedModel | None = None) -> None:
        super().__init__(rng=rng)
        self.speeds = SpeedModel() if speeds is None else speeds

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        speeds = self.speeds
        costs = []
        for candidate in candidates:
            slowness = speeds.slowness(candidate.id, now)
            wait = candidate.load.wait_s(speeds.seconds, slowness, now)
            costs.append((wait + slowness * own_s(facts, candidate.id, speeds)) / candidate.weight)
        return Choice(least(costs, self._rng), "lowest_cost", costs)

    def estimates(self, now: float) -> Mapping[str, object]:
        return asdict(self.speeds.estimates(now))

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)


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


class PrefixAffinity(Policy):
    """Follows the longest known prefix while the cluster is balanced.

    The `cache_aware` policy of SGLang's router (now the Shepherd model gateway) and of vllm-router, with its
    thresholds: when loads are far apart the least loaded endpoint is taken; otherwise the endpoint that holds the
    longest prefix, if that is a large enough share of the prompt; otherwise the least loaded one.
    """

    uses_overlap = True
    reasons = {
        "overlap": "no other endpoint holds more of this prompt",
        "no_overlap": "no endpoint is known to hold any of this prompt",
        "imbalanced": "the loads are far apart, so the least loaded was taken",
    }

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        loads = [candidate.load.in_flight for candidate in candidates]
        busiest = max(loads)
        idlest = min(loads)
        if busiest - idlest > _AHEAD and busiest > idlest * _TIMES:
            return Choice(least_loaded(candidates, self._rng), "imbalanced")
        facts = request.facts
        matched = [facts.matched_tokens(candidate.id) for candidate in candidates]
        if facts.prompt_tokens == 0 or max(matched) / facts.prompt_tokens <= _KNOWN_SHARE:
            return Choice(least_loaded(candidates, self._rng), "no_overlap")
        return Choice(least([-tokens for tokens in matched], self._rng), "overlap")
