"""How urgent one cluster's requests are, on the scale of `waiting_lines`."""

from __future__ import annotations

from collections.abc import Callable

from kvproxy.base.types import Clock, EndpointId, utc_seconds
from kvproxy.cluster.routing.costs import own_s
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.waiting_lines import LEVEL_S, urgency_s

#: Half-life of the work granted to a tenant.
HALF_LIFE_S = 60.0
#: Upper bound of a tenant's penalty, so that its requests never starve.
MAX_BEHIND_S = 10.0
#: Bound on the tenants tracked; further ones have no penalty.
MAX_TENANTS = 1024

_REFRESH_S = 1.0
_FORGOTTEN_S = 0.001

#: 2026-01-01 00:00 UTC: wall-clock seconds since then keep the numbers positive (an engine treats a missing one as 0
#: and admits it first) and exact.
EPOCH_S = 1_767_225_600.0


class TenantTurns:
    """Granted prefill seconds by tenant, decaying. A tenant is behind by what it was granted, an endpoint, above the
    mean of all that were granted something; one alone is never behind."""

    def __init__(self) -> None:
        self._granted: dict[str, float] = {}
        self._mean_s = 0.0
        self._at = 0.0  # time of the last decay

    def grant_work(self, tenant: str, own_s: float, now: float) -> None:
        """Charge a tenant for a placed request."""
        self._refresh(now)
        granted = self._granted
        if tenant in granted or len(granted) < MAX_TENANTS:
            granted[tenant] = granted.get(tenant, 0.0) + own_s

    def behind_s(self, tenant: str, endpoints: int, now: float) -> float:
        """Return the seconds of urgency by which the tenant's next request is delayed, among this many endpoints."""
        self._refresh(now)
        excess = self._granted.get(tenant, 0.0) - self._mean_s
        return min(MAX_BEHIND_S, max(0.0, excess / max(1, endpoints)))

    def _refresh(self, now: float) -> None:
        """Once a second at most, so that a request costs a look-up however many tenants there are."""
        if now - self._at < _REFRESH_S:
            return
        left = 0.5 ** ((now - self._at) / HALF_LIFE_S)
        granted = {tenant: s * left for tenant, s in self._granted.items() if s * left > _FORGOTTEN_S}
        self._granted = granted
        self._at = now
        self._mean_s = sum(granted.values()) / len(granted) if granted else 0.0


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

    @staticmethod
    def engine_priority(urgency: float) -> int:
        """Return the same in milliseconds, as vLLM takes it in `priority`: an integer, the lower first."""
        return round(1000.0 * urgency)
