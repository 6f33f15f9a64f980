"""What the router answers by itself, and that nothing it is told of can hurt a request."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.app import Proxy
from kvproxy.config.load import load_config
from kvproxy.filters.chain import FilterContext, FilterType
from kvproxy.listener.server import Server, serve
from kvproxy.request.exchange import Exchange
from kvproxy.request.observer import RequestObserver
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.proxy import chat, running_proxy
from tests.support.until import until


async def test_a_model_without_a_route_does_not_exist() -> None:
    """404 in OpenAI's shape, Anthropic's on its own path, and the engine hears nothing."""
    engine = FakeEngine("a")
    routes = [{"model": "known"}]
    async with serve(engine) as url, running_proxy({"a": url}, routes=routes) as proxy:
        openai = await proxy.client.post("/v1/chat/completions", json=chat(model="other"))
        body = {"model": "other", "max_tokens": 1, "messages": []}
        anthropic = await proxy.client.post("/v1/messages", json=body)
        nowhere = await proxy.client.post("/v1/score", json={})
    assert (openai.status_code, openai.json()["error"]["code"]) == (404, "unknown_model")
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "no_route")
    assert not engine.calls


async def test_a_model_no_endpoint_declares_is_not_served() -> None:
    """The cluster is there, but none of its engines has the model."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy([{"id": "a", "url": url, "models": ["m1"]}]) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat(model="m2"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_served")
    assert not engine.calls


async def test_without_any_engine_there_is_no_model_list() -> None:
    """503, and asked again next time: an engine that is there by then is listed at once."""
    up = False

    async def starting(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200 if up else 503, b'{"data": [{"id": "m1"}]}')

    async with (
        serve(FakeEngine("a", starting)) as url,
        running_proxy({"a": url, "dead": "http://127.0.0.1:9"}) as proxy,
    ):
        assert (await proxy.client.get("/v1/models")).status_code == 503
        up = True
        assert (await proxy.client.get("/v1/models")).json()["data"] == [{"id": "m1"}]


def build_troublesome(inner: Any, settings: object, context: FilterContext) -> Any:
    """A filter whose observer fails when it is told of the end."""

    class Fails(RequestObserver):
        def finished(self, exchange: Exchange, now: float) -> None:
            raise ZeroDivisionError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange.of(scope, now=context.clock())
        exchange.attach(Fails())
        await inner(scope, receive, send)

    return app


async def test_an_observer_that_fails_is_logged_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """Another filter's mistake must not cost an answer."""
    extra = {"troublesome": FilterType(None, build_troublesome)}
    async with serve(FakeEngine("a")) as url:
        raw = {"endpoints": {"a": url}, "health": {"active": False}, "filters": ["troublesome", "router"]}
        config = load_config(raw, extra_filters={"troublesome": None})
        async with Proxy(config, extra_filters=extra) as proxy, Server(proxy) as server:
            status = await raw_get(server.port, "/v1/responses/1")
    assert status == b"HTTP/1.1 200 OK"
    assert "an observer of requests failed: Fails at `finished`" in caplog.text


async def test_the_proxy_runs_under_somebody_elses_lifespan() -> None:
    """`uvicorn module:app` enters it and leaves it; other scopes than http are left alone."""
    async with serve(FakeEngine("a")) as url:
        proxy = Proxy(load_config({"endpoints": {"a": url}, "health": {"interval": "50ms"}}))
        inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        sent: list[str] = []

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await inbox.put({"type": "lifespan.startup"})
        life = asyncio.create_task(proxy({"type": "lifespan"}, inbox.get, send))
        await until(lambda: sent)
        await proxy({"type": "websocket"}, inbox.get, send)
        assert sent == ["lifespan.startup.complete"]
        await inbox.put({"type": "lifespan.shutdown"})
        await asyncio.wait_for(life, 60)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def raw_get(port: int, path: str) -> bytes:
    """The status line of a plain GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    line = await asyncio.wait_for(reader.readline(), 60)
    await reader.read()
    writer.close()
    return line.strip()


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
