"""least_ttft: greedy by estimated time to first token, as Mooncake's Conductor schedules.

    cost = wait + slowness * own

The same ledger and the same learned speeds as kv_aware, without what makes that one look further than this request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from random import Random

from kvproxy.routing.forecast import own_s
from kvproxy.routing.least import least
from kvproxy.routing.load import Features
from kvproxy.routing.policy import Candidate, Choice, PickRequest
from kvproxy.routing.speeds import SpeedModel
from kvproxy.types import EndpointId


class LeastTtft:
    """Least estimated time to first token (a Learner)."""

    def __init__(self, *, rng: Random, speeds: SpeedModel | None = None) -> None:
        self.speeds = SpeedModel() if speeds is None else speeds
        self._rng = rng

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, speeds, costs = request.facts, self.speeds, []
        speeds.requests_without_sample += 1
        for candidate in candidates:
            slowness = speeds.slowness(candidate.id, now)
            wait = candidate.load.wait_s(speeds.seconds, slowness, now)
            costs.append((wait + slowness * own_s(facts, candidate.id, speeds)) / candidate.weight)
        return Choice(least(costs, self._rng), "lowest_cost", costs)

    def learned(self, now: float) -> Mapping[str, object]:
        """The present estimates."""
        return asdict(self.speeds.estimates(now))

    def observe_sample(
        self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool = False
    ) -> None:
        self.speeds.observe(endpoint, work, busy_s, now, scraped=scraped)

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        """Speeds are all it learns."""

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)
