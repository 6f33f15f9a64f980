"""Answers of the router itself, and that no preference can hurt a request."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from starlette.types import Send

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.filters.chain import FilterContext, FilterType
from kvproxy.proxy.listener.server import Server, serve
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver
from tests.support.fake_engine import Behaviour, Call, FakeEngine, reply
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
        none = await proxy.client.get("/v1/models")
        assert (none.status_code, none.headers["retry-after"]) == (503, "1")
        assert none.json()["error"]["code"] == "no_endpoints"
        up = True
        assert (await proxy.client.get("/v1/models")).json()["data"] == [{"id": "m1"}]


def closed_to(*keys: str) -> Behaviour:
    """Return an engine with API keys of its own: 401 without one of them."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        sent = dict(call.headers).get(b"authorization", b"").decode()
        if sent.removeprefix("Bearer ") not in keys:
            await reply(send, 401, b'{"error": "Unauthorized"}')
        else:
            await reply(send, 200, b'{"data": [{"id": "of-%b"}]}' % engine.name.encode())

    return behave


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_models_of_engines_that_want_the_clients_key() -> None:
    """The client's credential goes to engines without one of their own, and what they list is shown to it alone."""
    async with (
        serve(FakeEngine("a", closed_to("one", "both"))) as a,
        serve(FakeEngine("b", closed_to("both"))) as b,
        running_proxy({"a": a, "b": b}) as proxy,
    ):

        async def listed(key: str) -> list[str]:
            answered = await proxy.client.get("/v1/models", headers=bearer(key))
            return [row["id"] for row in answered.json()["data"]]

        assert await listed("both") == ["of-a", "of-b"]
        assert await listed("one") == ["of-a"]
        wrong = await proxy.client.get("/v1/models", headers=bearer("wrong"))
        nameless = await proxy.client.get("/v1/models")
        for refused in (wrong, nameless):
            assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert (await proxy.client.get("/v1/models/of-b", headers=bearer("one"))).status_code == 404


async def test_a_clients_key_never_goes_to_an_engine_with_one_of_its_own() -> None:
    """Nor to one that asks for none."""
    engines = [FakeEngine("own", closed_to("own-key")), FakeEngine("open", closed_to(""))]
    async with serve(engines[0]) as own, serve(engines[1]) as free:
        endpoints = [{"id": "own", "url": own, "api_key": "own-key"}, {"id": "open", "url": free}]
        async with running_proxy(endpoints) as proxy:
            answered = await proxy.client.get("/v1/models", headers=bearer("clients"))
            assert {row["id"] for row in answered.json()["data"]} == {"of-own", "of-open"}
    sent = [value for engine in engines for call in engine.listings for value in dict(call.headers).values()]
    assert not any(b"clients" in value for value in sent)


async def test_an_adapter_that_was_loaded_through_the_proxy_is_listed_at_once() -> None:
    """The list is remembered for two seconds, and forgotten when a client loads or unloads an adapter."""
    adapters: list[str] = []

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        if call.path == "/v1/load_lora_adapter":
            adapters.append("lora")
        await reply(send, 200, msgspec.json.encode({"data": [{"id": name} for name in ["base", *adapters]]}))

    filters = [{"router": {"paths": ["/v1/load_lora_adapter"]}}]
    async with serve(FakeEngine("a", behave)) as url, running_proxy({"a": url}, filters=filters) as proxy:
        before = (await proxy.client.get("/v1/models")).json()["data"]
        await proxy.client.post("/v1/load_lora_adapter", json={"lora_name": "lora"})
        after = (await proxy.client.get("/v1/models")).json()["data"]
    assert [row["id"] for row in before] == ["base"]
    assert [row["id"] for row in after] == ["base", "lora"]


def build_troublesome(inner: Any, settings: object, context: FilterContext) -> Any:
    """Build a filter whose observer fails at the end."""

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
        raw = {
            "endpoints": {"a": url},
            "health": {"active": False},
            "filters": ["troublesome", "router"],
            "policy": "random",
        }
        config = load_config(raw, extra_filters={"troublesome": None})
        async with Proxy(config, extra_filters=extra) as proxy, Server(proxy) as server:
            status = await raw_get(server.port, "/v1/responses/1")
    assert status == b"HTTP/1.1 200 OK"
    assert "an observer of requests failed: Fails at `finished`" in caplog.text


async def test_the_proxy_runs_under_somebody_elses_lifespan() -> None:
    """`uvicorn module:app` enters it and leaves it."""
    async with serve(FakeEngine("a")) as url:
        proxy = Proxy(load_config({"endpoints": {"a": url}, "health": {"interval": "50ms"}}))
        inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        sent: list[str] = []

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await inbox.put({"type": "lifespan.startup"})
        life = asyncio.create_task(proxy({"type": "lifespan"}, inbox.get, send))
        await until(lambda: sent)
        await inbox.put({"type": "lifespan.shutdown"})
        await asyncio.wait_for(life, 60)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def raw_get(port: int, path: str) -> bytes:
    """Send a plain GET and return the status line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    line = await asyncio.wait_for(reader.readline(), 60)
    await reader.read()
    writer.close()
    return line.strip()


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
