"""The server span of every request, and under it gathering facts, the decision and every attempt; the W3C trace context
a request came with and takes along. Imported only where a chain names `tracing`, since it needs OpenTelemetry."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.cluster.pick import Pick
from kvproxy.features.tracing.trace_attributes import (
    LOOKED_AT_BYTES,
    Values,
    answer_attributes,
    attempt_attributes,
    decision_attributes,
    fact_attributes,
    failure,
    outcome_attributes,
    response_attributes,
    server_attributes,
    trace_parent,
)
from kvproxy.proxy.filters.chain import WallClock
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver

_W3C = TraceContextTextMapPropagator()
#: A stream ends with its finish reason, its usage and a mark, which may come in pieces of their own.
LAST_PIECES = 4
_CONTEXT = (b"traceparent", b"tracestate")


class TracingFilter(Step):
    """Filter that begins a server span for every request, as a child of the client's if it sent a W3C trace context.

    Later filters see this span's context in the request's headers; a sampled request is followed through its stages by
    a `RequestTrace`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tracer: Tracer,
        metrics: Metrics,
        clock: Clock,
        wall_clock: WallClock,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._tracer = tracer
        self._wall_clock = wall_clock

    def before(self, exchange: Exchange, downstream: Downstream) -> None:
        """Begin the server span."""
        scope = downstream.scope
        base_ns = int(self._wall_clock().timestamp() * 1e9) - int(self.clock() * 1e9)
        name, attributes = server_attributes(scope)
        server = self._tracer.start_span(
            name,
            context=parent_of(scope["headers"]),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=base_ns + int(exchange.received_at * 1e9),
        )
        span = server.get_span_context()
        carried = headers_of(span)
        if carried:
            exchange.trace_id = format_trace_id(span.trace_id)
            scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] not in _CONTEXT), *carried]
        if server.is_recording():
            exchange.attach(
                RequestTrace(
                    server=server,
                    tracer=self._tracer,
                    clock=self.clock,
                    to_ns=lambda at: base_ns + int(at * 1e9),
                )
            )


def parent_of(headers: Headers) -> Context:
    """Return the client's trace context; an empty one when it sent none, an invalid one, or several."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return Context()
    states = b",".join(value for name, value in headers if name == b"tracestate")
    carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": states.decode("latin-1")}
    return _W3C.extract(carrier, context=Context())


def headers_of(context: SpanContext) -> Headers:
    """Return this span context as request headers; none for an invalid one."""
    if not context.is_valid:
        return []
    headers = [(b"traceparent", trace_parent(context))]
    if context.trace_state:
        headers.append((b"tracestate", context.trace_state.to_header().encode("latin-1")))
    return headers


class RequestTrace(RequestObserver):
    """Follows one sampled request: spans between instants of the proxy's clock, turned into wall-clock nanoseconds by
    `to_ns`."""

    def __init__(
        self,
        *,
        server: Span,
        tracer: Tracer,
        clock: Clock,
        to_ns: Callable[[float], int],
    ) -> None:
        self._server = server
        self._context = set_span_in_context(server, Context())
        self._tracer = tracer
        self._clock = clock
        self._to_ns = to_ns
        self._facts_at = 0.0
        self._deciding_since: float | None = None
        self._attempt: Span | None = None
        self._attempt_at = 0.0
        self._attempts = 0
        self._head = b""
        self._last: deque[bytes] = deque(maxlen=LAST_PIECES)

    def facts_began(self, exchange: Exchange) -> None:
        """Begin the span `facts`."""
        self._facts_at = self._clock()

    def facts_known(self, exchange: Exchange) -> None:
        """End the span `facts`."""
        self._child("facts", self._facts_at, attributes=fact_attributes(exchange))

    def received(self, exchange: Exchange, now: float) -> None:
        """From here on an endpoint is being chosen."""
        self._deciding_since = now

    def attempt_began(self, exchange: Exchange, pick: Pick) -> None:
        """End the span `decision` and begin that of an attempt; its context goes to the endpoint."""
        now = self._clock()
        began = now if self._deciding_since is None else self._deciding_since
        self._child("decision", began, attributes=decision_attributes(exchange, pick))
        name, attributes = attempt_attributes(exchange, pick.endpoint)
        if self._attempts:
            attributes["http.request.resend_count"] = self._attempts
        self._attempts += 1
        self._attempt_at = now
        self._attempt = self._tracer.start_span(
            name, context=self._context, kind=SpanKind.CLIENT, attributes=attributes, start_time=self._to_ns(now)
        )
        exchange.trace_parent = trace_parent(self._attempt.get_span_context())

    def attempt_failed(self, exchange: Exchange, reason: str, now: float) -> None:
        """End the attempt's span and begin the next decision."""
        self._end_attempt({}, failed=reason)
        self._deciding_since = now

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        """Keep the first piece, with the answer's id and model, and the last ones, with its finish reasons."""
        self._head = self._head or piece
        self._last.append(piece)

    def ended(self, exchange: Exchange, status: int, crash: str) -> None:
        """End the last spans."""
        failed = crash or failure(exchange, status, errors_from=500)
        if not self._attempts and self._deciding_since is not None and exchange.outcome.cluster:
            decided: Values = {"kvproxy.cluster": exchange.outcome.cluster}
            self._child("decision", self._deciding_since, attributes=decided, failed=failed)
        answer = answer_attributes(exchange, sent_at=self._attempt_at)
        if answer and exchange.inference is not None and status < 400:
            tail = b"".join(piece[-LOOKED_AT_BYTES:] for piece in self._last)
            answer |= response_attributes(self._head, tail)
        self._end_attempt(answer, failed=crash or failure(exchange, status, errors_from=400))
        self._server.set_attributes(outcome_attributes(exchange, status))
        _end(self._server, self._now_ns(), failed=failed)

    def _end_attempt(self, attributes: Values, *, failed: str) -> None:
        span = self._attempt
        self._attempt = None
        if span is not None:
            span.set_attributes(attributes)
            _end(span, self._now_ns(), failed=failed)

    def _child(self, name: str, began: float, *, attributes: Values, failed: str = "") -> None:
        """Record a span that began at `began` and ends now."""
        span = self._tracer.start_span(
            name, context=self._context, attributes=attributes, start_time=self._to_ns(began)
        )
        _end(span, self._now_ns(), failed=failed)

    def _now_ns(self) -> int:
        return self._to_ns(self._clock())


def _end(span: Span, at_ns: int, *, failed: str) -> None:
    if failed:
        span.set_attribute("error.type", failed)
        span.set_status(StatusCode.ERROR, failed)
    span.end(at_ns)
