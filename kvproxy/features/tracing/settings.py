"""Settings of tracing."""

from __future__ import annotations

from kvproxy.base.settings.model import Model, Name


class TracingSettings(Model):
    """Settings of `tracing` (OpenTelemetry; the standard `OTEL_` variables set the destination of spans)."""

    service_name: Name = "kvproxy"
    """`service.name` of the spans, unless set by `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES`."""
    provider_name: Name = "vllm"
    """`gen_ai.provider.name` of the attempts: kind of the engines."""
