"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class AccessLog(Feature):
    """Writes one line per request."""

    name = "access_log"

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter, with its lines among the context's lifetimes."""
        from kvproxy.features.access_log.access_log import build

        return build(inner, settings, context)


FEATURE = AccessLog()
