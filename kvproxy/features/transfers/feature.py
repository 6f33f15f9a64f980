"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Duration, Model
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.base.types import EndpointId
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.operate.config.schema import find_filters
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.lmcache import LmcacheFacts
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.receipts.receipt import Receipt


class TransferSettings(Model):
    """Copying KV to where it will be needed: from a shared store into an instance's memory (LMCache's coordinator), or
    from one instance to another (its controller, where the engines have P2P). Needs `lmcache_endpoint`."""

    retired = {"ahead": "turns took 1.04 of the time without copies ahead of them; `on_demand` copies where it helps"}

    on_demand: bool = False
    """To where a request goes, as part of the decision. Needs a cluster with `queue`."""
    max_wait: Duration = Field(default=2.0, gt=0, le=60)
    """On demand: upper bound of a request's wait for its copy, which is never longer than the expected saving."""
    at_once: int = Field(default=2, ge=1, le=64)
    """Transfers under way at once, over all instances; further ones are not made."""
    tokens_per_second: int = Field(default=50_000, ge=1)
    """Budget of all instances together; 8,192 are 1 GB/s where a token's KV is 128 KiB."""
    timeout: Duration = 2.0
    """A transfer that is not over by then has failed."""
    min_tokens: int = Field(default=1024, ge=1)
    """Fewer tokens are not worth a transfer."""


class TransferPlace(Model):
    """The section that the `kvcache` filter gets."""

    transfers: TransferSettings = TransferSettings()
    """KV copied to where it will be needed."""


#: Its name.
NOTE = "transfer"
#: Of a transfer that is not over.
UNDER_WAY = "under_way"


class TransferResult(msgspec.Struct, omit_defaults=True):
    """KV was to be copied to an endpoint for the request, before it went there."""

    endpoint: EndpointId
    source: str  # an endpoint, or `shared`
    tokens: int  # that were expected there
    #: done, late (the request went first), left (its client did, or its endpoint became unhealthy), no_effect, timeout,
    #: ... as for actions
    result: str = UNDER_WAY
    moved: int = 0
    waited_s: float = 0.0  # by the request, for the copy alone


class TransfersFeature(Feature):
    """Copies KV to where a request goes."""

    name = "transfers"
    metric_group = "TransferMetrics"
    settings = {KvCacheSettings: (TransferPlace,)}

    def verify(self, config: Config) -> Iterator[Finding]:
        """Refuse copies that nothing could make or wait for."""
        for at, settings in find_filters(config, KvCacheSettings):
            own = part_of(settings, TransferPlace).transfers
            if not settings.enabled:
                continue
            where = (*at, "transfers", "on_demand")
            if own.on_demand and not settings.lmcache_endpoint:
                yield error_at(where, "needs lmcache_endpoint, which moves KV", follows=((*at, "lmcache_endpoint"),))
            if own.on_demand and not any(one.queues for one in config.clusters.values()):
                why = "no cluster has a queue, without which nothing is copied on demand"
                yield error_at(where, why, "leave `queue: {enabled: false}` out of a cluster with kv_aware")
            if "max_wait" in own.model_fields_set and not own.on_demand:
                yield warning_at((*at, "transfers", "max_wait"), "does nothing without on_demand")

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None while it is switched off."""
        from kvproxy.features.transfers.on_demand import CopyObserver

        return CopyObserver(parts) if part_of(parts.settings, TransferPlace).transfers.on_demand else None

    def list_notes(self) -> Mapping[str, type[msgspec.Struct]]:
        """Return what became of the copy for the request."""
        return {NOTE: TransferResult}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield what was to be copied, and what came of it."""
        from kvproxy.operate.receipts.explain import format_seconds
        from kvproxy.operate.receipts.receipt import note_of

        if (found := note_of(receipt, NOTE, TransferResult)) is not None:
            route = f"to {found.endpoint} from {found.source}"
            yield f"before it was sent, {found.tokens} tokens were to be copied {route}:"
            waited = f"; it waited {format_seconds(found.waited_s)} for them" if found.waited_s else ""
            yield f"{found.result}, {found.moved} tokens moved{waited}"

    def list_lmcache_checks(self, lmcache: LmcacheFacts) -> Sequence[Check]:
        """Return the check of the service's ways to copy."""
        from kvproxy.features.transfers.check import check_transfers

        return (check_transfers(lmcache),)


FEATURE = TransfersFeature()
