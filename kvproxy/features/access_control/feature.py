"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class AccessControl(Feature):
    """Decides which clients may call, from which pages, and how much."""

    name = "access_control"
    metric_group = "AccessMetrics"

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter around `inner`."""
        from kvproxy.features.access_control import auth, cors, rate_limit

        if name == "cors":
            return cors.build(inner, settings, context)
        return auth.build(inner, settings, context) if name == "auth" else rate_limit.build(inner, settings, context)


FEATURE = AccessControl()
