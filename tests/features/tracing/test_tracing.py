"""Filter `tracing`: spans of a request through the whole proxy, into memory or a collector on loopback."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import NoOpTracer, SpanKind, StatusCode
from starlette.types import Receive, Scope, Send

from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.features.tracing import tracing
from kvproxy.features.tracing.settings import TracingSettings
from kvproxy.features.tracing.trace_attributes import TraceExport, server_attributes
from kvproxy.features.tracing.trace_spans import TracingFilter
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server, serve
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.fake_engine import Call, FakeEngine, event, reply, start_stream
from tests.support.filter_context import NOON, filter_context
from tests.support.proxy import chat, running_proxy
from tests.support.until import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
CHAT = "/v1/chat/completions"
DEFAULT = ["request_id", "inference_request", "kvcache", "router"]


class Traced:
    """A proxy whose spans end in memory, and a client that talks to it."""

    def __init__(self, exporter: InMemorySpanExporter, client: httpx.AsyncClient) -> None:
        self._exporter = exporter
        self.client = client

    async def spans(self, *, requests: int = 1) -> list[ReadableSpan]:
        """Spans of that many requests, as they began; waits for the servers' spans, which end last."""
        await until(lambda: self._servers() == requests)
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def _servers(self) -> int:
        return sum(span.kind is SpanKind.SERVER for span in self._exporter.get_finished_spans())


#: Round robin tries the engines in order; a policy that clients may ask for needs facts, so that these have a span.
PLAIN: dict[str, Any] = {"policy": "random", "client_policies": [], "filters": ["inference_request", "router"]}
LOOKED_ON = {"policy": "round_robin", "client_policies": ["kv_aware"]}


@contextlib.asynccontextmanager
async def traced(*engines: FakeEngine, sampler: Sampler | None = None, **config: Any) -> AsyncIterator[Traced]:
    """Yield the whole proxy in front of these engines, tried in this order, behind the filter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler or ParentBased(ALWAYS_ON), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with contextlib.AsyncExitStack() as stack:
        urls = {engine.name: await stack.enter_async_context(serve(engine)) for engine in engines}
        raw = {"endpoints": urls, "health": {"active": False}, "filters": DEFAULT, **LOOKED_ON, **config}
        proxy = await stack.enter_async_context(Proxy(load_config(raw)))
        app = TracingFilter(
            proxy,
            tracer=provider.get_tracer("test"),
            metrics=Metrics(),
            clock=asyncio.get_running_loop().time,
            wall_clock=lambda: datetime.now(UTC),
        )
        server = await stack.enter_async_context(Server(app, drain_s=2))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60))
        yield Traced(exporter, client)


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def stream_two(engine: FakeEngine, call: Call, send: Send) -> None:
    await start_stream(send)
    await event(send, b'{"id":"chatcmpl-7","model":"m-served","choices":[{"delta":{"content":"\\"id\\":\\"x\\""}}]}')
    await event(send, b'{"id":"chatcmpl-7","choices":[{"delta":{},"finish_reason":"stop"}]}')
    usage = (
        b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}'
    )
    await event(send, usage)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def answer_500(engine: FakeEngine, call: Call, send: Send) -> None:
    await reply(send, 500, b'{"error":{"message":"boom"}}')


async def answer_400(engine: FakeEngine, call: Call, send: Send) -> None:
    await reply(send, 400, b'{"error":{"message":"bad temperature"}}')


async def die_in_the_stream(engine: FakeEngine, call: Call, send: Send) -> None:
    await start_stream(send)
    await event(send, b'{"choices":[]}')
    raise ConnectionAbortedError


async def test_every_stage_is_a_span() -> None:
    """Server span, then facts, decision and one attempt under it, each in its place and with its words."""
    async with traced(FakeEngine("a", stream_two)) as proxy:
        answer = await proxy.client.post(CHAT, json=chat(stream=True, max_tokens=7), headers={"x-request-id": "r1"})
        assert answer.status_code == 200
        server, facts, decision, attempt = await proxy.spans()
    assert [span.name for span in (server, facts, decision, attempt)] == [f"POST {CHAT}", "facts", "decision", "chat m"]
    assert (server.kind, decision.kind, attempt.kind) == (SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.CLIENT)
    assert {span.parent.span_id for span in (facts, decision, attempt) if span.parent} == {server.context.span_id}
    assert server.parent is None
    assert facts.end_time <= decision.end_time <= attempt.end_time <= server.end_time  # type: ignore[operator]
    assert told(server)["http.response.status_code"] == 200
    assert told(server)["kvproxy.request_id"] == "r1"
    assert told(server)["http.route"] == CHAT
    assert told(facts)["kvproxy.prompt_tokens"] > 0
    assert told(decision)["kvproxy.policy"] == "round_robin"
    assert told(decision)["kvproxy.endpoint"] == "a"
    found = told(attempt)
    assert found.pop("gen_ai.response.finish_reasons") == ("stop",)
    assert (found.pop("gen_ai.response.id"), found.pop("gen_ai.response.model")) == ("chatcmpl-7", "m-served")
    assert found.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert found.pop("server.port") > 0
    assert found == {
        "kvproxy.endpoint": "a",
        "server.address": "127.0.0.1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "http.response.status_code": 200,
    }
    assert all(span.status.status_code is StatusCode.UNSET for span in (server, facts, decision, attempt))


async def test_a_known_prompt_shows_who_holds_it_and_that_it_was_preferred() -> None:
    """The second time the facts name the holder, how much and by what source; the decision says it was followed."""
    filters = ["inference_request", {"kvcache": {"prefer": True}}, "router"]
    async with traced(FakeEngine("a"), FakeEngine("b"), filters=filters) as proxy:
        for _ in range(2):
            await proxy.client.post(CHAT, json=chat("words " * 2000))
        spans = await proxy.spans(requests=2)
    first, second = [told(span) for span in spans if span.name == "facts"]
    decision = [told(span) for span in spans if span.name == "decision"][1]
    assert "kvproxy.match.endpoint" not in first
    assert second["kvproxy.match.endpoint"] == decision["kvproxy.endpoint"]
    assert second["kvproxy.match.tokens"] > 1000
    assert second["kvproxy.match.source"] == "approximate"
    assert decision["kvproxy.preference"] == "followed"


async def test_a_tracer_that_is_off_changes_nothing() -> None:
    """The client's own context goes through as it came."""
    inner = Inner()
    app = TracingFilter(inner, tracer=NoOpTracer(), metrics=Metrics(), clock=FakeClock(), wall_clock=lambda: NOON)
    scope = http_scope("/x", headers=[(b"tracestate", b"v=1")])
    await call(app, scope)
    assert inner.scopes[0]["headers"] == [(b"tracestate", b"v=1")]
    assert not inner.exchange.observers


async def test_the_names_are_the_conventions_own() -> None:
    """Every `gen_ai.` attribute is one that OpenTelemetry defines."""
    defined = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    async with traced(FakeEngine("a", stream_two)) as proxy:
        await proxy.client.post(CHAT, json=chat(stream=True, max_tokens=7))
        used = {name for span in await proxy.spans() for name in told(span) if name.startswith("gen_ai.")}
    assert len(used) == 12
    assert used <= defined


async def test_the_clients_trace_goes_on_and_the_engine_continues_the_attempt() -> None:
    """The client's span is the server span's parent; the attempt's span is the engine's parent; state is handed on."""
    engine = FakeEngine("a")
    async with traced(engine) as proxy:
        await proxy.client.post(CHAT, json=chat(), headers={"traceparent": PARENT, "tracestate": "v=1"})
        spans = await proxy.spans()
    server, attempt = spans[0], spans[-1]
    assert server.parent is not None
    assert f"{server.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == "b7ad6b7169203331"
    assert engine.calls[0].header("traceparent") == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    assert [value for name, value in engine.calls[0].headers if name == b"tracestate"] == [b"v=1"]
    assert sum(name == b"traceparent" for name, _ in engine.calls[0].headers) == 1


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "garbage"), ("tracestate", "v=1")],
        [("traceparent", PARENT), ("traceparent", PARENT), ("tracestate", "v=1")],
        [("tracestate", "v=1")],
        [],
    ],
)
async def test_without_a_usable_context_a_trace_begins(headers: list[tuple[str, str]]) -> None:
    """A broken or ambiguous context is none, and its state goes nowhere."""
    engine = FakeEngine("a")
    async with traced(engine) as proxy:
        await proxy.client.post(CHAT, json=chat(), headers=headers)
        server = (await proxy.spans())[0]
    assert server.parent is None
    assert f"{server.context.trace_id:032x}" != TRACE
    assert (engine.calls[0].header("traceparent") or "").split("-")[1] == f"{server.context.trace_id:032x}"
    assert engine.calls[0].header("tracestate") is None


async def test_each_attempt_is_a_span_with_its_own_parent_id_upstream() -> None:
    """A retry shows as a failed attempt, a decision and another attempt; each engine continues its own."""
    asked: list[tuple[str, Call]] = []

    async def fail_first(engine: FakeEngine, call: Call, send: Send) -> None:
        asked.append((engine.name, call))
        await reply(send, 500 if len(asked) == 1 else 200, b"{}")

    async with traced(FakeEngine("a", fail_first), FakeEngine("b", fail_first)) as proxy:
        assert (await proxy.client.post(CHAT, json=chat())).status_code == 200
        server, _, decided, failed, decided_again, served = spans = await proxy.spans()
    assert [s.name for s in spans] == [f"POST {CHAT}", "facts", "decision", "chat m", "decision", "chat m"]
    assert told(failed)["error.type"] == "status_5xx"
    assert failed.status.status_code is StatusCode.ERROR
    assert "http.request.resend_count" not in told(failed)
    assert told(served)["http.request.resend_count"] == 1
    assert served.status.status_code is StatusCode.UNSET
    assert told(server)["kvproxy.attempts"] == 2
    for (name, call_), decision, span in zip(asked, (decided, decided_again), (failed, served), strict=True):
        assert told(decision)["kvproxy.endpoint"] == told(span)["kvproxy.endpoint"] == name
        assert (call_.header("traceparent") or "").split("-")[2] == f"{span.context.span_id:016x}"


async def test_no_endpoint_is_a_failed_decision() -> None:
    """No endpoint to pick: the decision failed and there is no attempt."""
    async with traced(FakeEngine("a"), endpoints=[{"id": "a", "url": "http://127.0.0.1:9", "models": ["other"]}],
                      **PLAIN) as proxy:  # fmt: skip
        assert (await proxy.client.post(CHAT, json=chat())).status_code == 404
        server, decision = await proxy.spans()
    assert decision.name == "decision"
    assert told(decision) == {"kvproxy.cluster": "default"}
    assert server.status.status_code is StatusCode.UNSET


async def test_a_connection_that_fails_everywhere_is_an_error() -> None:
    """502: the attempt says why, the server span is an error."""
    async with traced(FakeEngine("a"), endpoints={"a": "http://127.0.0.1:9"}, retry={"attempts": 1}) as proxy:
        assert (await proxy.client.post(CHAT, json=chat())).status_code == 502
        spans = await proxy.spans()
    assert told(spans[-1])["error.type"] == "connect_error"
    assert (told(spans[0])["error.type"], told(spans[0])["kvproxy.end"]) == ("502", "local_reply")
    assert spans[0].status.status_code is StatusCode.ERROR


async def test_a_client_error_is_the_attempts_error_only() -> None:
    """4xx: an error for the client that sent the request, not for the server that refused it."""
    async with traced(FakeEngine("a", answer_400)) as proxy:
        assert (await proxy.client.post(CHAT, json=chat())).status_code == 400
        spans = await proxy.spans()
    assert told(spans[-1])["error.type"] == "400"
    assert spans[0].status.status_code is StatusCode.UNSET
    assert told(spans[0])["http.response.status_code"] == 400


async def test_a_stream_that_breaks_off_is_an_error_despite_its_status() -> None:
    """The status was 200 when it went down; the spans say what became of it."""
    async with traced(FakeEngine("a", die_in_the_stream)) as proxy:
        with contextlib.suppress(httpx.RemoteProtocolError):
            await proxy.client.post(CHAT, json=chat(stream=True))
        spans = await proxy.spans()
    assert {told(spans[0])["error.type"], told(spans[-1])["error.type"]} == {"upstream_died"}
    assert told(spans[0])["http.response.status_code"] == 200


async def test_other_requests_have_a_plain_name() -> None:
    """Unknown paths never become span names: their number is not ours to bound."""
    async with traced(
        FakeEngine("a"), filters=["inference_request", "router"], policy="random", client_policies=[]
    ) as proxy:
        await proxy.client.get("/v1/responses/thing")
        server, _, attempt = await proxy.spans()
    assert (server.name, attempt.name) == ("GET", "forward")
    assert "gen_ai.request.model" not in told(attempt)


def test_an_unknown_method_has_no_name_of_its_own() -> None:
    """As the conventions say; methods are the client's to invent."""
    name, attributes = server_attributes(http_scope("/x", method="BREW"))
    assert (name, attributes["http.request.method"]) == ("HTTP", "_OTHER")


async def test_an_unsampled_request_makes_no_spans_and_keeps_its_trace() -> None:
    """The client's decision not to sample is followed and handed on."""
    engine = FakeEngine("a")
    async with traced(engine) as proxy:
        await proxy.client.post(CHAT, json=chat(), headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"})
        assert not proxy._exporter.get_finished_spans()
    seen = engine.calls[0].header("traceparent") or ""
    assert seen.startswith(f"00-{TRACE}-")
    assert seen.endswith("-00")


async def test_a_crash_inside_ends_the_span_with_its_name() -> None:
    """Whatever an inner filter raises is seen, and passes on."""

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("x")

    exporter, clock = InMemorySpanExporter(), FakeClock()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = TracingFilter(
        crash,
        tracer=provider.get_tracer("t"),
        metrics=Metrics(),
        clock=clock,
        wall_clock=lambda: NOON,
    )
    with pytest.raises(KeyError):
        await call(app, http_scope("/x", client=None))
    (span,) = exporter.get_finished_spans()
    assert told(span)["error.type"] == "KeyError"
    assert span.start_time == int(NOON.timestamp() * 1e9)
    assert "client.address" not in told(span)


async def test_other_scopes_pass() -> None:
    """Lifespan is none of its business."""
    inner = Inner()
    app = TracingFilter(
        inner, tracer=TracerProvider(shutdown_on_exit=False).get_tracer("t"),
        metrics=Metrics(), clock=FakeClock(), wall_clock=lambda: NOON,
    )  # fmt: skip
    await call(app, {"type": "lifespan"})
    assert inner.scopes == [{"type": "lifespan"}]


@dataclass
class Collector:
    """An OTLP collector: remembers what is posted to /v1/traces."""

    posted: list[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        assert scope["path"] == "/v1/traces"
        self.posted.append(body)
        await reply(send, 200, b"", b"application/x-protobuf")

    def spans(self) -> dict[str, str]:
        """Names of spans by service name."""
        found = {}
        for body in self.posted:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {pair.key: pair.value.string_value for pair in group.resource.attributes}["service.name"]
                found.update({span.name: service for scope in group.scope_spans for span in scope.spans})
        return found


@pytest.mark.parametrize(("named", "service"), [("", "kvproxy"), ("from-env", "from-env")])
async def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch, named: str, service: str) -> None:
    """The filter in the configuration and the standard variables are all it takes; the end flushes what waits."""
    collector = Collector([])
    async with serve(collector) as collector_url, serve(FakeEngine("a")) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector_url)
        if named:
            monkeypatch.setenv("OTEL_SERVICE_NAME", named)
        filters = ["tracing", *DEFAULT]
        async with running_proxy({"a": url}, filters=filters, **LOOKED_ON) as proxy:
            await proxy.client.post(CHAT, json=chat())
    assert collector.spans() == dict.fromkeys([f"POST {CHAT}", "facts", "decision", "chat m"], service)


async def test_a_collector_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """The last spans have a limit; after it they are lost, and that is said."""
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Hanging(SpanExporter):
        """Takes spans and never comes back until told to."""

        def export(self, spans: Any) -> SpanExportResult:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(5)
            return SpanExportResult.SUCCESS

    export = TraceExport(exporter=Hanging(), shutdown_limit_s=0.01)
    async with export:
        export.tracer.start_span("lost").end()
    assert "did not take the last spans" in caplog.text
    release.set()


@pytest.mark.parametrize("switch", [{"OTEL_SDK_DISABLED": " True "}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_standard_switches_take_the_filter_out(switch: dict[str, str]) -> None:
    """Switched off means not there."""
    inner, context = Inner(), filter_context()
    assert tracing.build(inner, TracingSettings(), context, env=switch) is inner
    assert context.lifetimes == []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin is not supported (otlp or none)"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported (http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc is not supported"),
    ],
)
def test_unsupported_settings_are_reported_at_start(env: dict[str, str], message: str) -> None:
    """Not at the first span."""
    with pytest.raises(ConfigError) as caught:
        tracing.build(Inner(), TracingSettings(), filter_context(), env=env)
    assert message in str(caught.value)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name, not a traceback."""
    really = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith(("opentelemetry", "kvproxy.features.tracing.trace_")):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return really(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'kvproxy\[otel\]'"):
        tracing.build(Inner(), TracingSettings(), filter_context(), env={})


@pytest.mark.slow
def test_nothing_is_imported_unless_a_chain_names_it() -> None:
    """The whole proxy without `tracing` has no OpenTelemetry in its process."""
    program = (
        "import sys\n"
        "from kvproxy.app import Proxy\n"
        "Proxy({'endpoints': {'a': 'http://127.0.0.1:9'}})\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_the_trace_id_is_known_to_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of a request that is not recorded as well: its engine and its client may."""
    with caplog.at_level("INFO", "kvproxy.access"):
        for sampler in (ALWAYS_ON, ALWAYS_OFF):
            async with traced(FakeEngine("a"), sampler=sampler, filters=["access_log", *DEFAULT]) as proxy:
                await proxy.client.post(CHAT, json=chat(), headers={"traceparent": PARENT})
    lines = "\n".join(record.getMessage() for record in caplog.records if record.name == "kvproxy.access")
    assert lines.count(f"trace_id={TRACE}") == 2
