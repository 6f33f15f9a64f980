"""Filter `tracing`: OpenTelemetry spans. Nothing of OpenTelemetry is imported until a chain names this filter."""

from __future__ import annotations

import os
from collections.abc import Mapping

from starlette.types import ASGIApp

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.features.tracing.settings import TracingSettings
from kvproxy.proxy.filters.chain import FilterContext

_PROTOCOLS = frozenset({"", "http/protobuf"})
_EXPORTERS = frozenset({"", "otlp"})


def build(
    app: ASGIApp, settings: TracingSettings, context: FilterContext, *, env: Mapping[str, str] = os.environ
) -> ASGIApp:
    """Return the filter around `app`, and its exporter among the context's lifetimes; `app` itself when the standard
    variables switch tracing off. Raises ConfigError when the extra is missing or the variables ask for what is not
    there."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or _exporter(env) == "none":
        return app
    problems = _unsupported(env)
    if problems:
        raise ConfigError(problems)
    try:
        from kvproxy.features.tracing.trace_attributes import TraceExport
        from kvproxy.features.tracing.trace_spans import TracingFilter
    except ImportError as error:
        text = f"needs OpenTelemetry, which is not installed: {error}"
        raise ConfigError([Problem("", text, "pip install 'kvproxy[otel]'")]) from error
    export = TraceExport()
    context.lifetimes.append(export)
    return TracingFilter(
        app,
        tracer=export.tracer,
        metrics=context.metrics,
        clock=context.clock,
        wall_clock=context.wall_clock,
    )


def _exporter(env: Mapping[str, str]) -> str:
    return env.get("OTEL_TRACES_EXPORTER", "").strip().lower()


def _unsupported(env: Mapping[str, str]) -> list[Problem]:
    problems = []
    if _exporter(env) not in _EXPORTERS:
        text = f"OTEL_TRACES_EXPORTER={_exporter(env)} is not supported"
        problems.append(Problem("", text, "otlp or none"))
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    hint = "http/protobuf, usually port 4318 of the collector"
    return problems + [
        Problem("", f"{name}={env[name]} is not supported", hint)
        for name in names
        if env.get(name, "").strip().lower() not in _PROTOCOLS
    ]
