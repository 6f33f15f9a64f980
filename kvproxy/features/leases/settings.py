"""Settings of leases."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model


class LeaseSettings(Model):
    """Keeping prompts for conversations that are expected back: after an answer that calls a tool, and where clients
    ask for it. LMCache pins them. Needs `lmcache_endpoint`."""

    retired = {
        "touch": "sessions took 1.00 to 1.03 of their time with it, in four measurements",
        "max_leases": "there may be 1,000 at once, besides the budgets in tokens",
        "tenants": "every tenant has the same budget",
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


class LeasePlace(Model):
    """The section that the `kvcache` filter gets."""

    leases: LeaseSettings = LeaseSettings()
    """Prompts kept for conversations that are expected back."""
