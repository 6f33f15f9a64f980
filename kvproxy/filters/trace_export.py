"""Spans on their way to a collector, set up by the standard `OTEL_` variables."""

from __future__ import annotations

import asyncio
import logging
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from kvproxy import __version__

logger = logging.getLogger("kvproxy.tracing")


class TraceExport:
    """A tracer, and while entered the thread that sends its spans in batches; a full queue drops spans, never waits.

    `exporter` replaces OTLP over HTTP.
    """

    def __init__(
        self, *, service_name: str, exporter: SpanExporter | None = None, shutdown_limit_s: float = 5.0
    ) -> None:
        self._exporter = OTLPSpanExporter() if exporter is None else exporter
        named = {"service.name": service_name, **OTELResourceDetector().detect().attributes}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._shutdown_limit_s = shutdown_limit_s

    @property
    def tracer(self) -> Tracer:
        """Makes the spans."""
        return self._provider.get_tracer("kvproxy", __version__)

    async def __aenter__(self) -> TraceExport:
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sends what waits, within the limit; by a daemon thread, since a collector that hangs must not keep the
        process."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            try:
                loop.call_soon_threadsafe(ended.set)
            except RuntimeError:  # the loop was closed: nobody waits any more
                logger.debug("the trace exporter ended after the proxy")

        threading.Thread(target=shut_down, name="trace export shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(self._shutdown_limit_s):
                await ended.wait()
        except TimeoutError:
            logger.warning("the trace collector did not take the last spans within %g s", self._shutdown_limit_s)
