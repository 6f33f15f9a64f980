"""The feature, as kvproxy meets it: light, since a proxy loads every feature, whether it is on or off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class Greeting(Feature):
    """Greets clients."""

    name = "greeting"
    metric_group = "GreetingMetrics"

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter around `inner`."""
        from greeting.filter import GreetingFilter

        return GreetingFilter(inner, settings, context)


FEATURE = Greeting()
