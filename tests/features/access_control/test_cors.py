"""Filter cors: Starlette's middleware with our settings."""

from __future__ import annotations

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.features.access_control.cors import build
from kvproxy.features.access_control.settings import CorsSettings
from tests.support.asgi import Inner, call, http_scope
from tests.support.filter_context import filter_context

ORIGIN = (b"origin", b"https://app.example")


async def test_a_preflight_is_answered_here() -> None:
    """Browsers send it without credentials, so nothing behind this filter sees it."""
    inner = Inner()
    app = build(inner, CorsSettings(allow_origins=("https://app.example",)), filter_context())
    headers = [ORIGIN, (b"access-control-request-method", b"POST")]
    reply = await call(app, http_scope("/v1/completions", method="OPTIONS", headers=headers))
    assert (reply.status, inner.scopes) == (200, [])
    assert reply.headers[b"access-control-allow-origin"] == b"https://app.example"
    assert reply.headers[b"access-control-max-age"] == b"600"


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (CorsSettings(allow_origins=("*",)), b"*"),
        (CorsSettings(allow_origin_regex=r"https://.*\.example"), b"https://app.example"),
        (CorsSettings(allow_origins=("https://other.example",)), None),
    ],
)
async def test_origins_that_may_read_the_answer(settings: CorsSettings, allowed: bytes | None) -> None:
    """Allowed origins get the header, others get the plain answer."""
    reply = await call(build(Inner(), settings, filter_context()), http_scope(headers=[ORIGIN]))
    assert reply.headers.get(b"access-control-allow-origin") == allowed
    assert reply.body == b"ok"


async def test_exposed_headers() -> None:
    """Pages may read which endpoint served them."""
    reply = await call(
        build(Inner(), CorsSettings(allow_origins=("*",)), filter_context()), http_scope(headers=[ORIGIN])
    )
    assert reply.headers[b"access-control-expose-headers"] == b"x-request-id, x-kvproxy-endpoint, retry-after"


@pytest.mark.parametrize(
    ("settings", "message"),
    [(CorsSettings(), "no origin is allowed"), (CorsSettings(allow_origin_regex="("), "not a regular expression")],
)
def test_settings_that_cannot_work(settings: CorsSettings, message: str) -> None:
    """Said at start, not at the first request."""
    with pytest.raises(ConfigError, match=message):
        build(Inner(), settings, filter_context())


SDK_HEADERS = (
    b"authorization,content-type,x-stainless-retry-count,x-stainless-lang,x-stainless-package-version,x-stainless-os,"
    b"x-stainless-arch,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout,x-api-key,anthropic-version,"
    b"anthropic-dangerous-direct-browser-access"
)


@pytest.mark.parametrize("method", [b"POST", b"GET", b"DELETE"])
async def test_the_official_sdks_pass_with_the_defaults(method: bytes) -> None:
    """Their requests from a browser."""
    headers = [ORIGIN, (b"access-control-request-method", method), (b"access-control-request-headers", SDK_HEADERS)]
    app = build(Inner(), CorsSettings(allow_origins=("*",)), filter_context())
    reply = await call(app, http_scope("/v1/responses", method="OPTIONS", headers=headers))
    assert reply.status == 200
    assert method in reply.headers[b"access-control-allow-methods"]


async def test_pages_use_no_other_method() -> None:
    """The answer to a preflight request refuses it."""
    headers = [ORIGIN, (b"access-control-request-method", b"PUT")]
    app = build(Inner(), CorsSettings(allow_origins=("*",)), filter_context())
    reply = await call(app, http_scope("/v1/responses", method="OPTIONS", headers=headers))
    assert reply.status == 400
    assert b"PUT" not in reply.headers[b"access-control-allow-methods"]


async def test_vary_is_sent_once_in_front_of_an_engine_with_cors_of_its_own() -> None:
    """Other values of the field stay."""
    inner = Inner(headers=[(b"vary", b"Origin"), (b"vary", b"Accept-Encoding")])
    app = build(inner, CorsSettings(allow_origins=("https://app.example",)), filter_context())
    reply = await call(app, http_scope(headers=[ORIGIN]))
    assert reply.headers[b"vary"] == b"Accept-Encoding, Origin"
