"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features.transfers.settings import TransferPlace
from kvproxy.operate.feature import Feature, find_filters

if TYPE_CHECKING:
    from msgspec import Struct

    from kvproxy.cache.feature import CacheObserver, CacheParts
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.lmcache import LmcacheFacts
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.receipts.receipt import Receipt


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
            if own.max_wait and not own.on_demand:
                yield warning_at((*at, "transfers", "max_wait"), "does nothing without on_demand")

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None while it is switched off."""
        from kvproxy.features.transfers.copy_watch import CopyObserver

        return CopyObserver(parts) if part_of(parts.settings, TransferPlace).transfers.on_demand else None

    def list_notes(self) -> Mapping[str, type[Struct]]:
        """Return what became of the copy for the request."""
        from kvproxy.features.transfers.note import NOTE, TransferResult

        return {NOTE: TransferResult}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield what was to be copied, and what came of it."""
        from kvproxy.features.transfers.note import NOTE, TransferResult
        from kvproxy.operate.receipts.explain import format_seconds
        from kvproxy.operate.receipts.receipt import note_of

        if (found := note_of(receipt, NOTE, TransferResult)) is not None:
            route = f"to {found.endpoint} from {found.source}"
            yield f"before it was sent, {found.tokens} tokens were to be copied {route}:"
            waited = f"; it waited {format_seconds(found.waited_s)} for them" if found.waited_s else ""
            yield f"{found.result}, {found.moved} tokens moved{waited}"

    def list_lmcache_checks(self, lmcache: LmcacheFacts) -> Sequence[Check]:
        """Return the check of the service's ways to copy."""
        from kvproxy.features.transfers.check import TransfersCheck

        return (TransfersCheck(lmcache),)


FEATURE = TransfersFeature()
