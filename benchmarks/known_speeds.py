"""kv_aware with the engines' true speeds: the reference for learned ones."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvproxy.base.types import EndpointId, LowerTokens
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Features
from kvproxy.lab.replay.pooled import average_seconds
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.view import endpoint_id
from kvproxy.lab.simulator.timing import EngineTiming


class KnownSpeeds(SpeedModel):
    """The engines' own timing, at every moment; learns nothing."""

    def __init__(self, seconds: Features, timings: dict[EndpointId, EngineTiming]) -> None:
        super().__init__()
        self.seconds = seconds
        self._timings = timings

    def slowness(self, endpoint: EndpointId, now: float) -> float:
        return self._timings[endpoint].factor_at(now)

    def slowness_of_all(self, endpoints: Sequence[EndpointId], now: float) -> list[float]:
        return [self.slowness(endpoint, now) for endpoint in endpoints]

    def observe(
        self,
        endpoint: EndpointId,
        work: Features,
        busy_s: float,
        now: float,
        *,
        lower: LowerTokens = (),
        scraped: bool = False,
    ) -> None:
        """Ignore the sample."""


def knowing(fleet: ReplayFleet, duration_s: float, *, rng: Random) -> KvAware:
    """Return the policy with the fleet's true speeds."""
    timings = {endpoint_id(i): fleet.engine_settings(512, i, duration_s).timing for i in range(fleet.instances)}
    return KvAware(rng=rng, speeds=KnownSpeeds(average_seconds(fleet), timings))
