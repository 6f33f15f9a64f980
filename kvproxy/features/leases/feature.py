"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features.leases.note import LeaseResult
from kvproxy.features.leases.settings import is_on
from kvproxy.operate.feature import Feature, StatusPart

if TYPE_CHECKING:
    from kvproxy.cache.feature import CacheObserver, CacheParts, View
    from kvproxy.operate.receipts.receipt import Receipt


class Leases(Feature):
    """Keeps prompts for conversations that are expected back."""

    name = "leases"
    metric_group = "LeaseMetrics"

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Tokens of the prompts that are to be pinned."""
        return CacheNeeds(facts=is_on(settings), uses=is_on(settings))

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """None while it is switched off."""
        from kvproxy.features.leases.leases import Leasing

        return Leasing(parts) if is_on(parts.settings) else None

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


FEATURE = Leases()
