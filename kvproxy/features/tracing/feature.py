"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class Tracing(Feature):
    """Writes OpenTelemetry spans of requests, decisions and attempts."""

    name = "tracing"

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter, or `inner` itself when the standard variables switch tracing off."""
        from kvproxy.features.tracing.tracing import build

        return build(inner, settings, context)


FEATURE = Tracing()
