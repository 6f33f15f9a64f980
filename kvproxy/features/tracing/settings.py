"""Settings of tracing."""

from __future__ import annotations

from kvproxy.base.settings.model import Model


class TracingSettings(Model):
    """Settings of `tracing`: OpenTelemetry has variables of its own (`OTEL_...`) for all of them."""

    retired = {
        "service_name": "set OTEL_SERVICE_NAME",
        "provider_name": "it is the kind of the engine",
    }
