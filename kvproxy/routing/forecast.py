"""How long prefills will take, by learned speeds: what the router queue is ordered and opened by."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.routing.load import prefill_s
from kvproxy.routing.policy import Candidate, OverlapFacts
from kvproxy.routing.speeds import SpeedModel
from kvproxy.types import EndpointId


def own_s(facts: OverlapFacts, endpoint: EndpointId, speeds: SpeedModel) -> float:
    """Pooled prefill seconds of a request on one endpoint once it begins, lower tiers brought up included."""
    overlap, prompt = facts.by_endpoint.get(endpoint), facts.prompt_tokens
    if overlap is None:
        return prefill_s(prompt, 0, 0, speeds.seconds)
    lower = overlap.lower_tokens
    matched = min(overlap.device_tokens + lower, prompt)
    return prefill_s(prompt - matched, matched, min(lower, matched), speeds.seconds)


def least_own_s(facts: OverlapFacts, candidates: Sequence[Candidate], speeds: SpeedModel) -> float:
    """The same where most is cached: what the router queue orders by."""
    return min(own_s(facts, candidate.id, speeds) for candidate in candidates)


def least_wait_s(candidates: Sequence[Candidate], speeds: SpeedModel, now: float) -> float:
    """Pending prefill seconds of the freest endpoint: what the router queue opens by."""
    seconds = speeds.seconds
    return min(candidate.load.wait_s(seconds, speeds.slowness(candidate.id, now), now) for candidate in candidates)
