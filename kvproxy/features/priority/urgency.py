"""How urgent one cluster's requests are, on the scale of `waiting_lines`."""

from __future__ import annotations

from collections.abc import Callable

from kvproxy.base.types import Clock, EndpointId, utc_seconds
from kvproxy.cluster.routing.costs import own_s
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.waiting_lines import EPOCH_S, LEVEL_S, TenantTurns, urgency_s


class UrgencyScale:
    """Urgency in seconds: own work at the learned speed, arrival, class and tenant."""

    def __init__(
        self,
        *,
        speeds: Callable[[], SpeedModel | None],
        wall_clock: Clock = utc_seconds,
    ) -> None:
        self._speeds = speeds
        self._wall_clock = wall_clock
        self._turns = TenantTurns()

    def urgency_s(
        self,
        facts: OverlapFacts,
        endpoint: EndpointId,
        *,
        received_at: float,
        now: float,
        level: int = 0,
        tenant: str = "",
        endpoints: int = 1,
    ) -> float:
        """Of a request that was received at that time of the clock and goes to `endpoint`, one of so many; the work is
        counted as granted to its tenant. `level`: of its class, larger first."""
        speeds = self._speeds()
        own = 0.0
        slowness = 1.0
        if speeds is not None:
            own = own_s(facts, endpoint, speeds)
            slowness = speeds.slowness(endpoint, now)
        class_s = level * LEVEL_S
        if tenant:
            class_s -= self._turns.behind_s(tenant, endpoints, now)
            self._turns.grant_work(tenant, own, now)
        arrived = self._wall_clock() - EPOCH_S - (now - received_at)
        return urgency_s(own, arrived, slowness=slowness, class_s=class_s)
