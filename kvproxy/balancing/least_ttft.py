"""least_ttft: greedy by estimated time to first token, as Mooncake's Conductor schedules.

    cost = wait + slowness * own

The same ledger and the same learned speeds as kv_aware, without what makes that one look further than this request.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvproxy.balancing.least import least
from kvproxy.balancing.load import Features, features_of, seconds_of
from kvproxy.balancing.policy import Candidate, Choice, Overlap, PickRequest
from kvproxy.balancing.speed import SpeedModel
from kvproxy.types import EndpointId

_NOTHING_HELD = Overlap(device_tokens=0)


class LeastTtft:
    """Least estimated time to first token (a Learner)."""

    def __init__(self, *, rng: Random, speeds: SpeedModel | None = None) -> None:
        self.speeds = SpeedModel() if speeds is None else speeds
        self._rng = rng

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, seconds = request.facts, self.speeds.seconds
        costs = []
        for candidate in candidates:
            matched = facts.matched_tokens(candidate.id)
            lower = min(facts.by_endpoint.get(candidate.id, _NOTHING_HELD).lower_tokens, matched)
            own_s = seconds_of(features_of(facts.prompt_tokens - matched, matched, lower), seconds)
            slowness = self.speeds.slowness(candidate.id, now)
            costs.append((candidate.load.wait_s(seconds, slowness, now) + slowness * own_s) / candidate.weight)
        return Choice(least(costs, self._rng), "lowest_cost", costs)

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float) -> None:
        self.speeds.observe(endpoint, work, busy_s, now)

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        """Speeds are all it learns."""

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)
