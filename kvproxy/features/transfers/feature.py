"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvproxy.base.settings.compose import part_of
from kvproxy.features.transfers.note import NOTE, TransferResult
from kvproxy.features.transfers.settings import TransferPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts
    from kvproxy.operate.doctor.deployment import StoreFacts
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.receipts.receipt import Receipt


class TransfersFeature(Feature):
    """Copies KV to where a request goes."""

    name = "transfers"
    metric_group = "TransferMetrics"

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

    def list_store_checks(self, store: StoreFacts) -> Sequence[Check]:
        """Return the check of the service's ways to copy."""
        from kvproxy.features.transfers.check import check_transfers

        return (check_transfers(store),)


FEATURE = TransfersFeature()
