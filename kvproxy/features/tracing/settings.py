"""Settings of tracing."""

from __future__ import annotations

from kvproxy.base.settings.feature_settings import AddedFilter, FeatureSettings, FilterOrder
from kvproxy.base.settings.model import Model


class TracingSettings(Model):
    """Settings of `tracing`: OpenTelemetry has variables of its own (`OTEL_...`) for all of them."""

    retired = {
        "service_name": "set OTEL_SERVICE_NAME",
        "provider_name": "it is the kind of the engine",
    }


SETTINGS = FeatureSettings(
    filters={"tracing": AddedFilter(TracingSettings, "request_id")},
    filter_order=(FilterOrder("tracing", "kvcache", "spans leave out the time kvcache takes"),),
)
