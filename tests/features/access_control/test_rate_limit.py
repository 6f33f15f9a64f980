"""Filter rate_limit: which client is counted for what, and when it is too much."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.errors import ConfigError
from kvproxy.base.types import InferenceRequest, Prompt, RequestKind
from kvproxy.features.access_control.rate_limit import MAX_KEYS, bucket_key, build, tokens_used
from kvproxy.features.access_control.settings import RateLimitSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from tests.support.asgi import Inner, Reply, call, http_scope
from tests.support.clock import FakeClock
from tests.support.filter_context import counted, filter_context


def filter_around(inner: ASGIApp, context: FilterContext, **settings: Any) -> ASGIApp:
    return build(inner, RateLimitSettings(**settings), context)


async def from_tenant(app: ASGIApp, tenant: str) -> Reply:
    scope = http_scope()
    Exchange.of(scope, now=0.0).tenant = tenant
    return await call(app, scope)


class Engine:
    """Ends each request as the router does: sets the outcome, then tells the observers."""

    def __init__(self, **outcome: Any) -> None:
        self.outcome = {"end": "completed", "status": 200, **outcome}
        self.inference: InferenceRequest | None = None
        self.chunks: tuple[bytes, ...] = (b"{}",)
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope, now=0.0)
        exchange.inference = self.inference
        for name, value in self.outcome.items():
            setattr(exchange.outcome, name, value)
        await Inner(chunks=self.chunks, headers=self.headers)(scope, receive, send)
        notify(RequestObserver.finished, exchange, FakeClock()())


async def test_requests_over_the_limit_wait_for_their_turn(clock: FakeClock) -> None:
    """A full bucket, then 429 until enough has come back."""
    context = filter_context(clock=clock)
    inner = Inner()
    app = filter_around(inner, context, requests_per_minute=2)
    assert [(await call(app, http_scope())).status for _ in range(3)] == [200, 200, 429]
    clock.advance(29.0)
    reply = await call(app, http_scope())
    assert (reply.status, reply.headers[b"retry-after"]) == (429, b"1")
    assert reply.json["error"]["type"] == "rate_limit_error"
    assert reply.json["error"]["code"] == "rate_limit_exceeded"
    assert "2 requests per minute" in reply.json["error"]["message"]
    clock.advance(1.0)
    assert (await call(app, http_scope())).status == 200
    assert len(inner.scopes) == 3
    assert counted(context, "kvproxy_rate_limited_total", kind="requests") == 2


async def test_tenants_and_addresses_have_buckets_of_their_own() -> None:
    """One client's excess is not another's, and a tenant counts the same from every address."""
    app = filter_around(Inner(), filter_context(), requests_per_minute=1)
    assert (await from_tenant(app, "a")).status == 200
    assert (await from_tenant(app, "b")).status == 200
    assert (await call(app, http_scope())).status == 200
    assert (await call(app, http_scope(client=("192.0.2.8", 1)))).status == 200
    assert (await from_tenant(app, "a")).status == 429
    assert (await call(app, http_scope(client=("192.0.2.7", 2)))).status == 429


@pytest.mark.parametrize(
    ("tenant", "client", "key"),
    [
        ("t", ("192.0.2.1", 1), "tenant t"),
        ("", ("192.0.2.1", 1), "address 192.0.2.1"),
        ("", ("::ffff:192.0.2.1", 1), "address 192.0.2.1"),
        ("", ("2001:db8:1:2:3::4", 1), "address 20010db800010002::/64"),
        ("", ("2001:db8:1:2:ffff::9", 1), "address 20010db800010002::/64"),
        ("", ("bad:address", 1), "address bad:address"),
        ("", ("x" * 100, 1), "address " + "x" * 64),
        ("", None, "address unknown"),
    ],
)
def test_bucket_key(tenant: str, client: tuple[str, int] | None, key: str) -> None:
    """A tenant, an IPv4 address, or the IPv6 network one customer has; never an unbounded text."""
    assert bucket_key(tenant, http_scope(client=client)) == key


async def test_tokens_are_charged_afterwards_and_may_go_into_debt(clock: FakeClock) -> None:
    """A request's tokens are not known before; the debt is paid by waiting."""
    context = filter_context(clock=clock)
    app = filter_around(Engine(prompt_tokens=900, completion_tokens=700), context, tokens_per_minute=600)
    first = await call(app, http_scope())
    assert (first.status, first.headers[b"x-ratelimit-remaining-tokens"]) == (200, b"600")
    refused = await call(app, http_scope())
    assert (refused.status, refused.headers[b"x-ratelimit-remaining-tokens"]) == (429, b"0")
    assert refused.headers[b"retry-after"] == b"101"
    clock.advance(101.0)
    assert (await call(app, http_scope())).status == 200
    assert counted(context, "kvproxy_rate_limited_total", kind="tokens") == 1


STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
GZIP = (b"Content-Encoding", b"gzip")
INFERENCE = InferenceRequest(kind=RequestKind.CHAT, model="m", prompt=Prompt(shape=b"x" * 40, parts=(b"y" * 60,) * 2))


@pytest.mark.parametrize(
    ("outcome", "inference", "tokens"),
    [
        ({"end": "completed", "status": 200, "prompt_tokens": 5, "completion_tokens": 2}, INFERENCE, 7),
        ({"end": "completed", "status": 200, "prompt_tokens": 5}, None, 5),
        ({"end": "completed", "status": 200, "completion_tokens": 2}, INFERENCE, 42),
        ({"end": "completed", "status": 200}, INFERENCE, 43),
        ({"end": "client_disconnected", "status": 499}, INFERENCE, 43),
        ({"end": "upstream_died", "status": 200}, INFERENCE, 43),
        ({"end": "completed", "status": 200}, None, 25 + 3),
        ({"end": "client_disconnected", "status": 499}, None, 25 + 3),
        ({"end": "completed", "status": 400}, None, 0),
        ({"end": "completed", "status": 400}, INFERENCE, 0),
        ({"end": "local_reply", "status": 503}, INFERENCE, 0),
    ],
)
def test_tokens_used(outcome: dict[str, Any], inference: InferenceRequest | None, tokens: int) -> None:
    """The engine's count, else an estimate, so that leaving early or hiding usage is not free; refusals are."""
    exchange = Exchange(received_at=0.0)
    exchange.inference = inference
    for name, value in outcome.items():
        setattr(exchange.outcome, name, value)
    assert tokens_used(exchange, 3, 100) == tokens


async def test_events_of_a_stream_without_usage_are_counted() -> None:
    """About one token an event, however they are cut into chunks."""
    engine = Engine()
    engine.inference = INFERENCE
    engine.chunks = (b"data: a\n\ndata: b\n\n", b"data: c\n\n")
    engine.headers = [STREAM]
    app = filter_around(engine, filter_context(), tokens_per_minute=1000)
    await call(app, http_scope())
    reply = await call(app, http_scope())
    assert reply.headers[b"x-ratelimit-remaining-tokens"] == b"%d" % (1000 - (160 // 4 + 3))


@pytest.mark.parametrize(
    ("path", "headers", "tokens"),
    [
        ("/v1/chat/completions", [], 100),
        ("/v1/messages", [GZIP], 100),
        ("/v1/responses", [STREAM, GZIP], 100),
        ("/generate", [], 100),
        ("/v1/chat/completions", [STREAM], 2),
        ("/v1/embeddings", [], 0),
        ("/v1/rerank", [GZIP], 0),
        ("/v1/audio/speech", [], 0),
    ],
)
async def test_generated_answers_without_usage_are_charged_by_their_bytes(
    path: str, headers: list[tuple[bytes, bytes]], tokens: int
) -> None:
    """Whole ones and compressed ones; of a stream the events say more, and of vectors and sounds no byte is a token."""
    engine = Engine()
    engine.inference = INFERENCE
    engine.chunks = (b"x" * 196 + b"\n\n\n\n", b"x" * 200)
    engine.headers = headers
    app = filter_around(engine, filter_context(), tokens_per_minute=1000)
    await call(app, http_scope(path))
    reply = await call(app, http_scope(path))
    assert reply.headers[b"x-ratelimit-remaining-tokens"] == b"%d" % (1000 - 160 // 4 - tokens)


async def test_unparsed_bodies_are_charged_by_their_bytes() -> None:
    """A body that was not parsed, on an unknown path, without usage in its answer."""
    engine = Engine()
    engine.chunks = (b"data: a\r\n\r\ndata: b\n\n",)
    engine.headers = [STREAM]

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        await engine(scope, receive, send)

    app = filter_around(reads, filter_context(), tokens_per_minute=1000)
    await call(app, http_scope(), body=b"x" * 400)
    await call(app, http_scope())
    reply = await call(app, http_scope())
    assert reply.headers[b"x-ratelimit-remaining-tokens"] == b"%d" % (1000 - (400 // 4 + 2))


async def test_headers_of_an_answer() -> None:
    """The remaining budget, as OpenAI's clients read it, beside the engine's own headers."""
    inner = Inner(headers=[(b"a", b"b")])
    app = filter_around(inner, filter_context(), requests_per_minute=60, tokens_per_minute=600, burst=0.5)
    reply = await call(app, http_scope())
    assert reply.headers == {
        b"a": b"b",
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"29",
        b"x-ratelimit-reset-requests": b"1.000s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"300",
        b"x-ratelimit-reset-tokens": b"0.000s",
    }


async def test_a_refusal_for_tokens_costs_no_request() -> None:
    """Nothing is taken unless everything is there."""
    app = filter_around(Engine(prompt_tokens=10**6), filter_context(), requests_per_minute=10, tokens_per_minute=100)
    await call(app, http_scope())
    replies = [await call(app, http_scope()) for _ in range(3)]
    assert {reply.status for reply in replies} == {429}
    assert replies[-1].headers[b"x-ratelimit-remaining-requests"] == b"9"


async def test_of_two_limits_the_longer_wait_is_told() -> None:
    """A client that comes back earlier would only be refused again."""
    context = filter_context()
    engine = Engine(prompt_tokens=300, completion_tokens=0)
    app = filter_around(engine, context, requests_per_minute=1, tokens_per_minute=60)
    assert (await call(app, http_scope())).status == 200
    reply = await call(app, http_scope())
    assert (reply.status, reply.headers[b"retry-after"]) == (429, b"241")
    assert "60 tokens per minute" in reply.json["error"]["message"]
    assert counted(context, "kvproxy_rate_limited_total", kind="tokens") == 1


async def test_a_tiny_burst_still_lets_one_in() -> None:
    """A bucket always holds at least one request."""
    app = filter_around(Inner(), filter_context(), requests_per_minute=1, burst=0.01)
    assert [(await call(app, http_scope())).status for _ in range(2)] == [200, 429]


async def test_buckets_are_bounded() -> None:
    """The bound is shown; beyond it the longest unused one is forgotten, as tests of buckets show."""
    context = filter_context()
    app = filter_around(Inner(), context, requests_per_minute=1)
    assert [(await from_tenant(app, t)).status for t in ("a", "b", "b")] == [200, 200, 429]
    assert counted(context, "kvproxy_queue_depth", queue="rate_limit") == 2
    assert counted(context, "kvproxy_queue_limit", queue="rate_limit") == MAX_KEYS


async def test_other_scope_types_pass() -> None:
    """Only requests are limited."""
    inner = Inner()
    await call(filter_around(inner, filter_context(), requests_per_minute=1), {"type": "lifespan"})
    assert inner.scopes == [{"type": "lifespan"}]


def test_no_limit_is_a_configuration_error() -> None:
    """A limiter that limits nothing is a mistake."""
    with pytest.raises(ConfigError, match="nothing is limited"):
        build(Inner(), RateLimitSettings(), filter_context())
