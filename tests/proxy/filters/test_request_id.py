"""Filter request_id: one sane id for engine, logs and client."""

from __future__ import annotations

import pytest
from starlette.types import ASGIApp

from kvproxy.base.metrics.groups import Metrics
from kvproxy.proxy.filter_settings import RequestIdSettings
from kvproxy.proxy.filters.request_id import RequestIdFilter, build
from kvproxy.proxy.listener.server import serve
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.fake_engine import FakeEngine
from tests.support.filter_context import filter_context
from tests.support.proxy import chat, running_proxy


def filter_around(inner: ASGIApp, *, header: str = "X-Request-ID", trust: bool = True) -> ASGIApp:
    return RequestIdFilter(
        inner, header=header, trust_client=trust, metrics=Metrics(), clock=FakeClock(), make_id=lambda: "fresh"
    )


async def test_a_sane_client_id_is_kept_everywhere() -> None:
    """The exchange, the inner app and the client all see the client's own id."""
    inner = Inner(headers=[(b"x-request-id", b"engine"), (b"x-other", b"1")])
    reply = await call(filter_around(inner), http_scope(headers=[(b"x-request-id", b"abc-1")]))
    assert inner.exchange.request_id == "abc-1"
    assert inner.scopes[0]["headers"] == [(b"x-request-id", b"abc-1")]
    assert reply.messages[0]["headers"] == [(b"x-other", b"1"), (b"x-request-id", b"abc-1")]


@pytest.mark.parametrize(
    "given", [[], [b""], [b"a b"], [b"a\x1b[31m"], [b"\xe9"], [b"x" * 129], [b"one", b"two"]], ids=str
)
async def test_anything_else_is_replaced(given: list[bytes]) -> None:
    """Missing, empty, unprintable, too long or ambiguous: a fresh id, and the client's does not reach the engine."""
    inner = Inner()
    headers = [(b"a", b"b"), *((b"x-request-id", value) for value in given)]
    scope = http_scope(headers=headers)
    reply = await call(filter_around(inner), scope)
    assert inner.exchange.request_id == "fresh"
    assert inner.scopes[0]["headers"] == [(b"a", b"b"), (b"x-request-id", b"fresh")]
    assert reply.headers[b"x-request-id"] == b"fresh"
    assert scope["headers"] == headers


async def test_an_untrusted_client_names_nothing() -> None:
    """With trust_client off every id is ours."""
    inner = Inner()
    await call(filter_around(inner, trust=False), http_scope(headers=[(b"x-request-id", b"abc")]))
    assert inner.exchange.request_id == "fresh"


async def test_another_header() -> None:
    """The configured header is the one read and answered, in any case."""
    inner = Inner()
    app = build(inner, RequestIdSettings(header="X-Correlation-ID"), filter_context())
    reply = await call(app, http_scope(headers=[(b"x-correlation-id", b"c"), (b"x-request-id", b"r")]))
    assert inner.exchange.request_id == "c"
    assert reply.headers == {b"x-correlation-id": b"c"}


async def test_fresh_ids_are_long_and_distinct() -> None:
    """128 bits each."""
    app = build(Inner(), RequestIdSettings(), filter_context())
    replies = [await call(app, http_scope()) for _ in range(100)]
    ids = {reply.headers[b"x-request-id"] for reply in replies}
    assert len(ids) == 100
    assert {len(one) for one in ids} == {32}


async def test_other_scope_types_pass() -> None:
    """The lifespan has no id."""
    inner = Inner()
    await call(filter_around(inner), {"type": "lifespan"})
    assert inner.scopes == [{"type": "lifespan"}]


async def test_an_id_in_the_body_is_the_id_everywhere() -> None:
    """As vLLM has it: `request_id` names the completion where no header does."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        path = "/v1/chat/completions"
        named = await proxy.client.post(path, json=chat(request_id="abc"))
        both = await proxy.client.post(path, json=chat(request_id="abc"), headers={"x-request-id": "header"})
        odd = await proxy.client.post(path, json=chat(request_id="a b"))
    assert named.headers["x-request-id"] == "abc"
    assert both.headers["x-request-id"] == "header"
    sent = [dict(call.headers)[b"x-request-id"] for call in engine.calls]
    assert sent[:2] == [b"abc", b"header"]
    assert sent[2] == odd.headers["x-request-id"].encode() != b"a b"
