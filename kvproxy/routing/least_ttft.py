"""least_ttft: greedy by estimated time to first token, as Mooncake's Conductor schedules.

    cost = wait + slowness * own

The same ledger and the same learned speeds as kv_aware, without what makes that one look further than this request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from random import Random

from kvproxy.routing.costs import LOWEST_COST, least, own_s
from kvproxy.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.work import Features
from kvproxy.types import EndpointId


class LeastTtft(Policy):
    """Least estimated time to first token, by learned speeds."""

    uses_overlap = True
    learns_speeds = True
    reasons = LOWEST_COST
    speeds: SpeedModel

    def __init__(self, *, rng: Random, speeds: SpeedModel | None = None) -> None:
        super().__init__(rng=rng)
        self.speeds = SpeedModel() if speeds is None else speeds

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, speeds, costs = request.facts, self.speeds, []
        for candidate in candidates:
            slowness = speeds.slowness(candidate.id, now)
            wait = candidate.load.wait_s(speeds.seconds, slowness, now)
            costs.append((wait + slowness * own_s(facts, candidate.id, speeds.seconds)) / candidate.weight)
        return Choice(least(costs, self._rng), "lowest_cost", costs)

    def estimates(self, now: float) -> Mapping[str, object]:
        return asdict(self.speeds.estimates(now))

    def observe_sample(
        self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool = False
    ) -> None:
        self.speeds.observe(endpoint, work, busy_s, now, scraped=scraped)

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)
