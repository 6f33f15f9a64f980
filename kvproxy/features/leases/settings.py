"""Settings of leases."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.cache.settings import KvCacheSettings, has_store
from kvproxy.operate.config.schema import Config, find_filters


class LeaseSettings(Model):
    """Keeping prompts for conversations that are expected back: after an answer that calls a tool, and where clients
    ask for it. LMCache pins them. Needs `lmcache_endpoint`."""

    retired = {
        "touch": "sessions took 1.00 to 1.03 of their time with it, in four measurements",
        "max_leases": "there may be 1,000 at once, besides the budgets in tokens",
        "endpoint_tokens": "500,000 tokens may be under lease at one endpoint, besides the tenants' budgets",
        "tenants": "every tenant has the same budget",
        "share": "pauses are no longer learned, a lease lasts for max_duration",
    }

    enabled: bool = False
    """Do it. Token ids of prompts under a lease are then kept in memory, never text."""
    max_duration: Duration = Field(default=900.0, gt=0, le=3600)
    """Duration of a lease; shorter if the client requests less."""
    min_tokens: int = Field(default=1024, ge=1)
    """Shorter prompts are not worth one."""
    tenant_tokens: int = Field(default=200_000, ge=0)
    """Under lease for one tenant (API key) at once; requests without one are a tenant together."""


class LeasePlace(Model):
    """The section that the `kvcache` filter gets."""

    leases: LeaseSettings = LeaseSettings()
    """Prompts kept for conversations that are expected back."""


def is_on(settings: KvCacheSettings) -> bool:
    return settings.enabled and part_of(settings, LeasePlace).leases.enabled


def verify(config: Config) -> Iterator[Finding]:
    """LMCache alone pins."""
    for at, settings in find_filters(config, KvCacheSettings):
        if is_on(settings) and not has_store(settings):
            missing = (*at, "lmcache_endpoint")
            yield error_at((*at, "leases", "enabled"), "needs lmcache_endpoint, which pins", follows=(missing,))


SETTINGS = FeatureSettings(fields={KvCacheSettings: (LeasePlace,)}, verify=verify)
