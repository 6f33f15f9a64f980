"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class Normalize(Feature):
    """Rewrites prompts so that engines can reuse them."""

    name = "normalize"
    metric_group = "NormalizeMetrics"

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter."""
        from kvproxy.features.normalize.normalize import build

        return build(inner, settings, context)


FEATURE = Normalize()
