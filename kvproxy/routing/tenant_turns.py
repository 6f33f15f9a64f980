"""What tenants were granted of late, as seconds by which a greedy one's next request comes later. Pure."""

from __future__ import annotations

#: Work granted counts half after this long.
HALF_LIFE_S = 60.0
#: No tenant is put behind by more: its requests wait, and do not starve.
MAX_BEHIND_S = 10.0
#: Tenants followed at once; further ones are never put behind.
MAX_TENANTS = 1024

_REFRESH_S = 1.0
_FORGOTTEN_S = 0.001


class TenantTurns:
    """Granted prefill seconds by tenant, decaying. A tenant is behind by what it was granted, an endpoint, above the
    mean of all that were granted something; one alone is never behind."""

    def __init__(self) -> None:
        self._granted: dict[str, float] = {}
        self._mean_s = 0.0
        self._at = 0.0  # when all of it was decayed last

    def grant(self, tenant: str, own_s: float, now: float) -> None:
        """A request of so much work was placed."""
        self._refresh(now)
        granted = self._granted
        if tenant in granted or len(granted) < MAX_TENANTS:
            granted[tenant] = granted.get(tenant, 0.0) + own_s

    def behind_s(self, tenant: str, endpoints: int, now: float) -> float:
        """Seconds of urgency that the tenant's next request comes later, among so many endpoints."""
        self._refresh(now)
        excess = self._granted.get(tenant, 0.0) - self._mean_s
        return min(MAX_BEHIND_S, max(0.0, excess / max(1, endpoints)))

    def _refresh(self, now: float) -> None:
        """Once a second at most, so that a request costs a look-up however many tenants there are."""
        if now - self._at < _REFRESH_S:
            return
        left = 0.5 ** ((now - self._at) / HALF_LIFE_S)
        granted = {tenant: s * left for tenant, s in self._granted.items() if s * left > _FORGOTTEN_S}
        self._granted, self._at = granted, now
        self._mean_s = sum(granted.values()) / len(granted) if granted else 0.0
