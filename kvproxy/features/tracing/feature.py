"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.model import Model
from kvproxy.operate.feature import Feature
from kvproxy.proxy.feature import FilterOrder, FilterPlace

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class TracingSettings(Model):
    """Settings of `tracing`: OpenTelemetry has variables of its own (`OTEL_...`) for all of them."""

    retired = {
        "service_name": "set OTEL_SERVICE_NAME",
        "provider_name": "it is the kind of the engine",
    }


class Tracing(Feature):
    """Writes OpenTelemetry spans of requests, decisions and attempts."""

    name = "tracing"
    filters = {"tracing": TracingSettings}
    filter_places = (FilterPlace("tracing", "request_id"),)
    filter_order = (FilterOrder("tracing", "kvcache", "spans leave out the time kvcache takes"),)

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter, or `inner` itself when the standard variables switch tracing off."""
        from kvproxy.features.tracing.tracing import build

        return build(inner, settings, context)


FEATURE = Tracing()
