"""Settings of leases."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model, Name


class LeaseBudget(Model):
    """Lease budget of one tenant."""

    tenant: Name
    """Name of its API key."""
    tokens: int = Field(ge=0)
    """At once; 0: no leases."""


class LeaseSettings(Model):
    """Keeping prompts for conversations that are expected back: after an answer that calls a tool, and where clients
    ask for it. LMCache pins them. Needs `lmcache_endpoint`."""

    retired = {
        "touch": "sessions took 1.00 to 1.03 of their time with it, in four measurements",
        "max_leases": "there may be 1,000 at once, besides the budgets in tokens",
        "share": "pauses are no longer learned, a lease lasts for max_duration",
    }

    enabled: bool = False
    """Do it. Token ids of prompts under a lease are then kept in memory, never text."""
    max_duration: Duration = Field(default=900.0, gt=0, le=3600)
    """Duration of a lease; shorter if the client requests less."""
    min_tokens: int = Field(default=1024, ge=1)
    """Shorter prompts are not worth one."""
    endpoint_tokens: int = Field(default=500_000, ge=0)
    """Under lease at one endpoint at once."""
    tenant_tokens: int = Field(default=200_000, ge=0)
    """Under lease for one tenant (API key) at once; requests without one are a tenant together."""
    tenants: tuple[LeaseBudget, ...] = ()
    """The same for single tenants, where it is another number."""

    def tenant_budget(self, tenant: str) -> int:
        """Tokens that may be under lease for it at once."""
        return next((one.tokens for one in self.tenants if one.tenant == tenant), self.tenant_tokens)


class LeasePlace(Model):
    """The section that the `kvcache` filter gets."""

    leases: LeaseSettings = LeaseSettings()
    """Prompts kept for conversations that are expected back."""
