"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class StoredResponses(Feature):
    """Keeps answers, so that any engine may go on from them."""

    name = "stored_responses"
    metric_group = "StoredResponsesMetrics"

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter."""
        from kvproxy.features.stored_responses.filter import build

        return build(inner, settings, context)


FEATURE = StoredResponses()
