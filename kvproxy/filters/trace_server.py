"""The server span of every request, and the W3C trace context it came with and takes along."""

from __future__ import annotations

from collections import deque

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Tracer, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.filters.chain import WallClock
from kvproxy.filters.trace_attributes import LOOKED_AT_BYTES, server_attributes, trace_parent
from kvproxy.filters.trace_spans import RequestTrace
from kvproxy.request.exchange import Exchange
from kvproxy.types import Clock, Headers

_W3C = TraceContextTextMapPropagator()
#: A stream ends with its finish reason, its usage and a mark, which may come in pieces of their own.
LAST_PIECES = 4
_CONTEXT = (b"traceparent", b"tracestate")


class TracingFilter:
    """Begins a server span for every request, as a child of the client's if it sent a W3C trace context.

    What comes after it sees this span's context in the request's headers; a sampled request is followed through its
    stages by a `RequestTrace` in the exchange.
    """

    def __init__(
        self, app: ASGIApp, *, tracer: Tracer, provider_name: str, clock: Clock, wall_clock: WallClock
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._provider_name = provider_name
        self._clock = clock
        self._wall_clock = wall_clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now = self._clock()
        exchange = Exchange.of(scope, now=now)
        base_ns = int(self._wall_clock().timestamp() * 1e9) - int(now * 1e9)
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
            scope = {**scope, "headers": [*(pair for pair in scope["headers"] if pair[0] not in _CONTEXT), *carried]}
        if not server.is_recording():
            await self._app(scope, receive, send)
            return
        trace = RequestTrace(
            server=server,
            tracer=self._tracer,
            provider_name=self._provider_name,
            clock=self._clock,
            to_ns=lambda at: base_ns + int(at * 1e9),
        )
        exchange.observers.append(trace)
        await self._follow(trace, exchange, scope, receive, send)

    async def _follow(
        self, trace: RequestTrace, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        status, crash, head = 0, "", b""
        last: deque[bytes] = deque(maxlen=LAST_PIECES)

        async def send_noting(message: Message) -> None:
            nonlocal status, head
            if message["type"] == "http.response.start":
                status = message["status"]
            elif body := message.get("body", b""):
                head = head or body
                last.append(body)
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception as error:
            crash = type(error).__name__
            raise
        finally:
            tail = b"".join(piece[-LOOKED_AT_BYTES:] for piece in last)
            trace.end(exchange, status, crash=crash, head=head, tail=tail)


def parent_of(headers: Headers) -> Context:
    """The client's trace context; an empty one when it sent none, an invalid one, or several."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return Context()
    states = b",".join(value for name, value in headers if name == b"tracestate")
    carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": states.decode("latin-1")}
    return _W3C.extract(carrier, context=Context())


def headers_of(context: SpanContext) -> Headers:
    """This span context as request headers; none for an invalid one."""
    if not context.is_valid:
        return []
    headers = [(b"traceparent", trace_parent(context))]
    if context.trace_state:
        headers.append((b"tracestate", context.trace_state.to_header().encode("latin-1")))
    return headers
