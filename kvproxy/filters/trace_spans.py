"""Under the server span: gathering facts, the decision, and every attempt."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context

from kvproxy.cluster.pick import Pick
from kvproxy.filters.trace_attributes import (
    Values,
    answer_attributes,
    attempt_attributes,
    decision_attributes,
    fact_attributes,
    failure,
    outcome_attributes,
    response_attributes,
    trace_parent,
)
from kvproxy.request.exchange import Exchange
from kvproxy.request.observer import RequestObserver
from kvproxy.types import Clock


class RequestTrace(RequestObserver):
    """Follows one sampled request: spans between instants of the proxy's clock, turned into wall-clock nanoseconds by
    `to_ns`."""

    def __init__(
        self,
        *,
        server: Span,
        tracer: Tracer,
        provider_name: str,
        clock: Clock,
        to_ns: Callable[[float], int],
    ) -> None:
        self._server = server
        self._context = set_span_in_context(server, Context())
        self._tracer = tracer
        self._provider_name = provider_name
        self._clock = clock
        self._to_ns = to_ns
        self._facts_at = 0.0
        self._deciding_since: float | None = None
        self._attempt: Span | None = None
        self._attempt_at = 0.0
        self._attempts = 0

    def facts_began(self, exchange: Exchange) -> None:
        """The span `facts` begins."""
        self._facts_at = self._clock()

    def facts_known(self, exchange: Exchange) -> None:
        """The span `facts` ends."""
        self._child("facts", self._facts_at, attributes=fact_attributes(exchange))

    def received(self, exchange: Exchange, now: float) -> None:
        """From here on an endpoint is being chosen."""
        self._deciding_since = now

    def attempt_began(self, exchange: Exchange, pick: Pick) -> None:
        """The span `decision` ends and that of an attempt begins; its context goes to the endpoint."""
        now = self._clock()
        began = now if self._deciding_since is None else self._deciding_since
        self._child("decision", began, attributes=decision_attributes(exchange, pick))
        name, attributes = attempt_attributes(exchange, pick.endpoint, provider_name=self._provider_name)
        if self._attempts:
            attributes["http.request.resend_count"] = self._attempts
        self._attempts += 1
        self._attempt_at = now
        self._attempt = self._tracer.start_span(
            name, context=self._context, kind=SpanKind.CLIENT, attributes=attributes, start_time=self._to_ns(now)
        )
        exchange.trace_parent = trace_parent(self._attempt.get_span_context())

    def attempt_failed(self, exchange: Exchange, reason: str, now: float) -> None:
        """The attempt's span ends; the next decision begins."""
        self._end_attempt({}, failed=reason)
        self._deciding_since = now

    def end(self, exchange: Exchange, status: int, *, crash: str = "", head: bytes = b"", tail: bytes = b"") -> None:
        """The request is over: `status` was sent to the client (0: nothing), an exception called `crash` came out.
        `head` and `tail` are the first and the last bytes of the answer."""
        failed = crash or failure(exchange, status, errors_from=500)
        if not self._attempts and self._deciding_since is not None and exchange.outcome.cluster:
            decided: Values = {"kvproxy.cluster": exchange.outcome.cluster}
            self._child("decision", self._deciding_since, attributes=decided, failed=failed)
        answer = answer_attributes(exchange, sent_at=self._attempt_at)
        if answer and exchange.inference is not None and status < 400:
            answer |= response_attributes(head, tail)
        self._end_attempt(answer, failed=crash or failure(exchange, status, errors_from=400))
        self._server.set_attributes(outcome_attributes(exchange, status))
        _end(self._server, self._now_ns(), failed=failed)

    def _end_attempt(self, attributes: Values, *, failed: str) -> None:
        span, self._attempt = self._attempt, None
        if span is not None:
            span.set_attributes(attributes)
            _end(span, self._now_ns(), failed=failed)

    def _child(self, name: str, began: float, *, attributes: Values, failed: str = "") -> None:
        """A span that began at `began` and ends now."""
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
