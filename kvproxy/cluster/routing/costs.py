"""How policies reckon what a request costs on an endpoint, and choose the least. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from kvproxy.base.types import EndpointId, cut_lower
from kvproxy.cluster.routing.policy import Candidate, Overlap, OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import prefill_s

#: Reasons of the policies whose choice is `least(costs)`.
LOWEST_COST: Mapping[str, str] = {"lowest_cost": "its cost is the least"}


def least(costs: Sequence[float], rng: Random) -> int:
    """Index of the least cost; ties fall to the rng, so that they do not herd onto the first endpoint."""
    lowest = min(costs)
    first = costs.index(lowest)
    if costs.count(lowest) == 1:
        return first
    return rng.choice([index for index, cost in enumerate(costs) if cost == lowest])


def least_loaded(candidates: Sequence[Candidate], rng: Random) -> int:
    """Index of the candidate with the least (in flight + 1) / weight; one of them at random when several have it."""
    shares = [(candidate.load.in_flight + 1) / candidate.weight for candidate in candidates]
    least = min(shares)
    ties = shares.count(least)
    index = shares.index(least)
    if ties > 1:
        for _ in range(int(rng.random() * ties)):
            index = shares.index(least, index + 1)
    return index


def own_s(facts: OverlapFacts, endpoint: EndpointId, speeds: SpeedModel) -> float:
    """Return the pooled prefill seconds of a request on one endpoint once it begins, loads from lower tiers
    included."""
    overlap = facts.by_endpoint.get(endpoint)
    prompt = facts.prompt_tokens
    return (
        prefill_s(prompt, 0, 0.0, speeds.seconds) if overlap is None else own_s_with(overlap, prompt, endpoint, speeds)
    )


def own_s_with(overlap: Overlap, prompt: int, endpoint: EndpointId, speeds: SpeedModel) -> float:
    """Return the same, of a prompt of which this is held there."""
    matched = min(overlap.tokens, prompt)
    onboarding_s = onboarding_s_of(overlap, prompt, endpoint, speeds) if overlap.lower else 0.0
    return prefill_s(prompt - matched, matched, onboarding_s, speeds.seconds)


def onboarding_s_of(overlap: Overlap, prompt_tokens: int, endpoint: EndpointId, speeds: SpeedModel) -> float:
    """Of these, pooled seconds to bring up what is on lower tiers and within the prompt."""
    return speeds.onboarding_s(endpoint, cut_lower(overlap.lower, prompt_tokens - overlap.device_tokens))


def least_own_s(facts: OverlapFacts, candidates: Sequence[Candidate], speeds: SpeedModel) -> float:
    """Return the same where most is cached: what the router queue orders by."""
    return min(own_s(facts, candidate.id, speeds) for candidate in candidates)


def wait_s(candidate: Candidate, speeds: SpeedModel, now: float) -> float:
    """Pending prefill seconds of one endpoint."""
    if not candidate.load.in_flight:
        return 0.0
    return candidate.load.wait_s(speeds.seconds, speeds.slowness(candidate.id, now), now)
