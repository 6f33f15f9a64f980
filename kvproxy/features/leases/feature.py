"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Duration, Model
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.operate.config.schema import find_filters
from kvproxy.operate.feature import Feature, StatusPart

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts, View
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.receipts.receipt import Receipt


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


class LeaseResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation came back to a prompt under a lease: what was promised of it and what the engine reused."""

    #: kept, broken, elsewhere (another endpoint answered), unverified (the engine does not say), early (before the
    #: engine was told to keep it)
    result: str
    why: str  # it was made: tool_call, client
    tokens: int  # promised
    reused: int = 0
    seconds: float = 0.0  # that computing what was reused would have taken, by the learned speeds


class Leases(Feature):
    """Keeps prompts for conversations that are expected back."""

    name = "leases"
    metric_group = "LeaseMetrics"
    settings = {KvCacheSettings: (LeasePlace,)}

    def verify(self, config: Config) -> Iterator[Finding]:
        """LMCache alone pins."""
        for at, settings in find_filters(config, KvCacheSettings):
            if _is_on(settings) and not settings.lmcache_endpoint:
                missing = (*at, "lmcache_endpoint")
                yield error_at((*at, "leases", "enabled"), "needs lmcache_endpoint, which pins", follows=(missing,))

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Tokens of the prompts that are to be pinned."""
        return CacheNeeds(facts=_is_on(settings), uses=_is_on(settings))

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None while it is switched off."""
        from kvproxy.features.leases.leases import Leasing

        return Leasing(parts) if _is_on(parts.settings) else None

    def list_notes(self) -> Mapping[str, type[msgspec.Struct]]:
        """Return the note of the lease on the prompt that the request continues."""
        return {"lease": LeaseResult}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield what was promised and what was reused."""
        from kvproxy.operate.receipts.explain import format_seconds
        from kvproxy.operate.receipts.receipt import note_of

        if (lease := note_of(receipt, "lease", LeaseResult)) is not None:
            saved = f", {format_seconds(lease.seconds)} of prefill" if lease.seconds else ""
            yield f"its conversation's last prompt was under a lease ({lease.why}): {lease.result},"
            yield f"{lease.reused} of {lease.tokens} tokens reused{saved}"

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        """Describe the promises; None: there are no leases."""
        from kvproxy.features.leases.leases import Leasing

        if view == "status":
            return {}
        if not isinstance(observer, Leasing):
            return {"promises": None}
        book = observer.book
        if view == "pins":
            return {"promises": book.describe(observer.settings, now)}
        numbers = {"prompts": len(book.leases), "tokens": sum(book.tenant_tokens.values())}
        return {"promises": {**numbers, "kept": book.results["kept"], "broken": book.results["broken"]}}

    def show_status(self, live: Mapping[str, Any], *, colour: bool) -> StatusPart:
        """Return a line of the promises, if there are leases."""
        from kvproxy.operate.commands.status import percent

        promises = (live["cache"] or {}).get("promises")
        if promises is None:
            return StatusPart()
        verified = promises["kept"] + promises["broken"]
        kept = f", promises kept {percent(promises['kept'] / verified)}" if verified else ""
        line = f"leases: {promises['prompts']} prompts, {promises['tokens']:,} tokens{kept}"
        return StatusPart(blocks=[[line]])


def _is_on(settings: KvCacheSettings) -> bool:
    return settings.enabled and part_of(settings, LeasePlace).leases.enabled


FEATURE = Leases()
