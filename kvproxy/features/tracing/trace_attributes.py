"""Attributes of spans, by OpenTelemetry's semantic conventions for HTTP and generative AI; and their export.

No prompt, no answer and no header ever goes into a span. Attributes beyond the conventions begin with `kvproxy.`."""

from __future__ import annotations

import asyncio
import logging
import re
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanContext, Tracer
from starlette.types import Scope

from kvproxy import __version__
from kvproxy.base.types import RequestKind
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH
from kvproxy.proxy.request.exchange import Exchange

logger = logging.getLogger("kvproxy.tracing")

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_OPERATIONS = {
    RequestKind.CHAT: "chat",
    RequestKind.COMPLETION: "text_completion",
    RequestKind.RESPONSES: "chat",
    RequestKind.EMBEDDINGS: "embeddings",
    RequestKind.MESSAGES: "chat",
}
#: Longest value taken from a client, in characters.
_LIMIT = 256

#: Bytes at either end of an answer in which its id, model and finish reasons are looked for.
LOOKED_AT_BYTES = 4096
_ID, _MODEL = (re.compile(rb'"%s"\s*:\s*"([^"\\]{1,256})"' % name) for name in (b"id", b"model"))
_REASON = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"([a-z_]{1,64})"')
_REASONS = 8

Values = dict[str, str | int | float | bool | list[str]]


def server_attributes(scope: Scope) -> tuple[str, Values]:
    """Name and first attributes of the server span. Only known paths are part of the name, so names are few."""
    method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
    path: str = scope["path"]
    attributes: Values = {
        "http.request.method": method,
        "url.scheme": scope["scheme"],
        "url.path": path[:_LIMIT],
    }
    if scope.get("client"):
        attributes["client.address"] = scope["client"][0]
    name = "HTTP" if method == "_OTHER" else method
    if path in KIND_OF_PATH:
        attributes["http.route"] = path
        name += f" {path}"
    return name, attributes


def fact_attributes(exchange: Exchange) -> Values:
    """Length of the prompt and the largest match, when facts were gathered."""
    facts = exchange.facts
    if facts is None:
        return {}
    found: Values = {"kvproxy.prompt_tokens": facts.prompt_tokens, "kvproxy.hot_tokens": facts.hot_tokens}
    best = max(facts.by_endpoint.items(), key=lambda item: item[1].tokens, default=None)
    if best is not None:
        endpoint, overlap = best
        found["kvproxy.match.endpoint"] = endpoint
        found["kvproxy.match.tokens"] = overlap.tokens
        found["kvproxy.match.device_tokens"] = overlap.device_tokens
        found["kvproxy.match.source"] = overlap.source
        found["kvproxy.match.age"] = overlap.age_s
    return found


def decision_attributes(exchange: Exchange, pick: Pick) -> Values:
    """Return the endpoint, the policy and the reason."""
    found: Values = {
        "kvproxy.cluster": exchange.outcome.cluster,
        "kvproxy.policy": pick.decision.policy,
        "kvproxy.reason": pick.decision.reason,
        "kvproxy.endpoint": pick.endpoint.id,
    }
    if pick.decision.preference is not None:
        found["kvproxy.preference"] = pick.decision.preference
    return found


def attempt_attributes(exchange: Exchange, endpoint: Endpoint) -> tuple[str, Values]:
    """Name and first attributes of the span of one attempt on `endpoint`."""
    origin = endpoint.origin
    attributes: Values = {
        "kvproxy.endpoint": endpoint.id,
        "server.address": origin.server_name or origin.host,
        "server.port": origin.port,
    }
    request = exchange.inference
    if request is None:
        return "forward", attributes
    operation = _OPERATIONS[request.kind]
    model = request.model[:_LIMIT]
    attributes["gen_ai.operation.name"] = operation
    attributes["gen_ai.provider.name"] = (endpoint.engine.software or "vllm").partition(" ")[0].lower()
    attributes["gen_ai.request.stream"] = request.stream
    if model:
        attributes["gen_ai.request.model"] = model
    if request.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.max_tokens
    return f"{operation} {model}".rstrip(), attributes


def outcome_attributes(exchange: Exchange, status: int) -> Values:
    """Return the server span's attributes at its end; `status` is the client's, 0 for none."""
    outcome = exchange.outcome
    attributes: Values = {"kvproxy.attempts": outcome.attempts}
    named = {
        "kvproxy.request_id": exchange.request_id,
        "kvproxy.tenant": exchange.tenant,
        "kvproxy.end": outcome.end,
        "kvproxy.endpoint": outcome.endpoint,
    }
    attributes.update({name: value for name, value in named.items() if value})
    if status:
        attributes["http.response.status_code"] = status
    return attributes


def answer_attributes(exchange: Exchange, *, sent_at: float) -> Values:
    """Return what the attempt that answered turned out to be; the request had been sent at `sent_at`."""
    outcome = exchange.outcome
    if outcome.ttft_s is None:
        return {}
    found: Values = {"http.response.status_code": outcome.status}
    usage = {
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
    }
    found.update({name: count for name, count in usage.items() if count is not None})
    if exchange.inference is not None and exchange.inference.stream:
        found["gen_ai.response.time_to_first_chunk"] = exchange.received_at + outcome.ttft_s - sent_at
    return found


def response_attributes(head: bytes, tail: bytes) -> Values:
    """Id, model and finish reasons of an answer, by its first and its last bytes. Quotes inside generated text are
    escaped, so that nothing of it is taken for a name."""
    found: Values = {}
    for name, pattern in (("gen_ai.response.id", _ID), ("gen_ai.response.model", _MODEL)):
        if match := pattern.search(head, 0, LOOKED_AT_BYTES):
            found[name] = match[1].decode("utf-8", "replace")
    reasons = [reason.decode() for reason in _REASON.findall(tail)]
    if reasons:
        found["gen_ai.response.finish_reasons"] = list(dict.fromkeys(reasons))[:_REASONS]
    return found


def failure(exchange: Exchange, status: int, *, errors_from: int) -> str:
    """Return the kind of error, "" when there was none: an answer that broke off whatever its status, or a status from
    `errors_from` on. A client that left is no error."""
    if exchange.outcome.end in ("engine_error", "upstream_died"):
        return exchange.outcome.end
    return str(status) if status >= errors_from else ""


def trace_parent(context: SpanContext) -> bytes:
    """Return the context as the value of W3C's `traceparent`."""
    return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)


class TraceExport:
    """A tracer, and while entered the thread that sends its spans in batches; a full queue drops spans, never waits.

    `exporter` replaces OTLP over HTTP.
    """

    def __init__(self, *, exporter: SpanExporter | None = None, shutdown_limit_s: float = 5.0) -> None:
        self._exporter = OTLPSpanExporter() if exporter is None else exporter
        named = {"service.name": "kvproxy", **OTELResourceDetector().detect().attributes}
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
        """Send what waits, within the limit; by a daemon thread, since a collector that hangs must not keep the
        process."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            try:
                loop.call_soon_threadsafe(ended.set)
            except RuntimeError:  # the loop was closed: no task waits any more
                logger.debug("the trace exporter ended after the proxy")

        threading.Thread(target=shut_down, name="trace export shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(self._shutdown_limit_s):
                await ended.wait()
        except TimeoutError:
            logger.warning("the trace collector did not take the last spans within %g s", self._shutdown_limit_s)
