"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvproxy.features.hygiene.note import NOTE, PrefixBreak
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.cache.feature import CacheObserver, CacheParts, View
    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.runtime.operated import AdminTarget


#: Rows of the live page.
_CAUSES = 8


class Hygiene(Feature):
    """Finds what keeps the prompts of returning sessions from being reused."""

    name = "hygiene"
    metric_group = "PrefixBreakMetrics"
    panel = "breaks"

    def list_notes(self) -> Mapping[str, type[msgspec.Struct]]:
        """Return what was computed again of the session's last prompt, and why."""
        return {NOTE: PrefixBreak}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield what was lost, and what helps."""
        from kvproxy.features.hygiene.comparison import ADVICE
        from kvproxy.operate.receipts.explain import format_seconds
        from kvproxy.operate.receipts.receipt import note_of

        if (found := note_of(receipt, NOTE, PrefixBreak)) is not None:
            what, fix = ADVICE.get(found.cause, (found.cause, ""))
            took = "" if found.seconds is None else f", {format_seconds(found.seconds)} of prefill"
            yield f"its session's last prompt was not reused: {what} ({found.part}): {found.tokens} tokens again{took}"
            if fix:
                yield f"what helps: {fix}"

    def observe_cache(self, parts: CacheParts) -> CacheObserver:
        """Return the observer that looks at every request's end."""
        from kvproxy.features.hygiene.prefix_breaks import PrefixBreaks

        return PrefixBreaks(parts)

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        """Return the dearest causes, for the live page."""
        from kvproxy.features.hygiene.prefix_breaks import PrefixBreaks

        if view != "live" or not isinstance(observer, PrefixBreaks):
            return {}
        book = observer.book
        return {"breaks": {"returned": book.returned, "causes": book.describe_causes(now)[:_CAUSES]}}

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return the list of breaks."""
        from kvproxy.features.hygiene.admin import list_routes

        return list_routes(operated)


FEATURE = Hygiene()
