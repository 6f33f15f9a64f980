"""Filter auth: which client gets in, what the engine sees of it, and how little a refusal tells."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import ASGIApp

from kvproxy.base.errors import ConfigError
from kvproxy.features.access_control.auth import build
from kvproxy.features.access_control.settings import AuthSettings
from kvproxy.proxy.filters.chain import FilterContext
from tests.support.asgi import Inner, Pairs, Reply, call, http_scope
from tests.support.filter_context import counted, filter_context

KEYS = ({"name": "alice", "key": "sk-a"}, {"name": "bob", "key": "sk-b"})


def filter_around(inner: ASGIApp, *, context: FilterContext | None = None, **settings: Any) -> ASGIApp:
    return build(inner, AuthSettings.model_validate({"keys": KEYS, **settings}), context or filter_context())


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ([(b"authorization", b"Bearer sk-a")], "alice"),
        ([(b"authorization", b"bearer  sk-b ")], "bob"),
        ([(b"x-api-key", b"sk-b")], "bob"),
        ([(b"x-api-key", b"whatever"), (b"authorization", b"Bearer sk-a")], "alice"),
    ],
)
async def test_a_known_key_names_the_tenant_and_stays_here(headers: Pairs, tenant: str) -> None:
    """OpenAI's and Anthropic's header both work; the engine sees neither, and the caller's scope is left alone."""
    inner = Inner()
    scope = http_scope(headers=[(b"accept", b"*/*"), *headers])
    reply = await call(filter_around(inner), scope)
    assert (reply.status, inner.exchange.tenant) == (200, tenant)
    assert inner.scopes[0]["headers"] == [(b"accept", b"*/*")]
    assert scope["headers"] == [(b"accept", b"*/*"), *headers]


async def test_forward_sends_the_credential_on() -> None:
    """For engines that check the client's key themselves."""
    inner = Inner()
    headers = [(b"authorization", b"Bearer sk-a")]
    await call(filter_around(inner, forward=True), http_scope(headers=headers))
    assert inner.scopes[0]["headers"] == headers


REFUSED = [
    ([], "missing"),
    ([(b"x-api-key", b"")], "missing"),
    ([(b"authorization", b"Bearer sk-c")], "unknown"),
    ([(b"x-api-key", b"sk-c")], "unknown"),
    ([(b"authorization", b"Bearer sk-\xff")], "unknown"),
    ([(b"authorization", b"Bearer ")], "malformed"),
    ([(b"authorization", b"Basic sk-a")], "malformed"),
    ([(b"authorization", b"sk-a")], "malformed"),
    ([(b"authorization", b"Bearer sk-a"), (b"authorization", b"Bearer sk-a")], "malformed"),
    ([(b"x-api-key", b"sk-a"), (b"x-api-key", b"sk-b")], "malformed"),
    ([(b"authorization", b"Basic x"), (b"x-api-key", b"sk-a")], "malformed"),
]


@pytest.mark.parametrize(("headers", "reason"), REFUSED)
async def test_everybody_else_is_refused_and_counted(headers: Pairs, reason: str) -> None:
    """401 with a challenge; the metric says why, the answer does not."""
    inner, context = Inner(), filter_context()
    reply = await call(filter_around(inner, context=context), http_scope(headers=headers))
    assert (reply.status, inner.scopes) == (401, [])
    assert reply.json["error"]["code"] == "invalid_api_key"
    assert reply.headers[b"www-authenticate"] == b'Bearer realm="kvproxy"'
    assert counted(context, "kvproxy_auth_failures_total", reason=reason) == 1


async def test_all_refusals_read_the_same() -> None:
    """A client that probes learns nothing from the text."""
    replies: list[Reply] = [await call(filter_around(Inner()), http_scope(headers=h)) for h, _ in REFUSED]
    assert len({(reply.status, reply.body, tuple(reply.headers.items())) for reply in replies}) == 1


async def test_refusals_in_anthropics_shape() -> None:
    """Anthropic's clients understand the refusal."""
    reply = await call(filter_around(Inner()), http_scope("/v1/messages", method="POST"))
    assert reply.json["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/health/", 401), ("/healthy", 401)])
async def test_exempt_paths_are_exact_and_still_hide_the_key(path: str, status: int) -> None:
    """An exempt path needs no key, and a key sent there does not reach the engine either."""
    inner = Inner()
    reply = await call(
        filter_around(inner, exempt_paths=["/health"]), http_scope(path, headers=[(b"authorization", b"Bearer x")])
    )
    assert reply.status == status
    assert [scope["headers"] for scope in inner.scopes] == ([[]] if status == 200 else [])


async def test_a_path_without_a_key_gives_no_rights() -> None:
    """To see decisions takes a key that says so, also where none is needed to get through."""
    inner = Inner()
    await call(filter_around(inner, exempt_paths=["/health"]), http_scope("/health"))
    (scope,) = inner.scopes
    exchange = scope["kvproxy"]
    assert (exchange.may_debug, exchange.trusted, exchange.tenant) == (False, False, "")


async def test_a_websocket_without_a_key_is_closed() -> None:
    """No kind of connection slips past; the lifespan is no client."""
    inner, context = Inner(), filter_context()
    app = filter_around(inner, context=context)
    reply = await call(app, http_scope(type="websocket"))
    assert reply.messages == [{"type": "websocket.close", "code": 1008}]
    assert inner.scopes == []
    await call(app, {"type": "lifespan"})
    assert inner.scopes == [{"type": "lifespan"}]


def test_no_key_is_a_configuration_error() -> None:
    """An auth filter that no client can pass is a mistake."""
    with pytest.raises(ConfigError, match="no client could call"):
        build(Inner(), AuthSettings(), filter_context())
