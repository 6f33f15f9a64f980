"""The operator's listener: what it answers, and to whom."""

from __future__ import annotations

import httpx
from pydantic import SecretStr

from kvproxy.admin.app import AdminApp
from kvproxy.app import Proxy
from kvproxy.config.load import load_mapping
from kvproxy.listener.server import Server, serve
from kvproxy.types import EndpointId
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import chat, running_proxy


def proxy_of(**config: object) -> Proxy:
    raw = {"endpoints": {"a": "http://127.0.0.1:9"}, "health": {"active": False}, **config}
    return Proxy(load_mapping(raw))


def client_of(proxy: Proxy) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=proxy.admin), base_url="http://admin")  # type: ignore[arg-type]


async def test_health_and_readiness() -> None:
    """Healthy as long as it answers; ready while an endpoint takes traffic and nobody drains."""
    proxy = proxy_of()
    async with client_of(proxy) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).text == "ready\n"
        proxy.clusters["default"].drain(EndpointId("a"))
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "no endpoint in default\n")
        proxy.draining = True
        assert (await client.get("/readyz")).text == "draining\n"


async def test_metrics_and_endpoints_after_a_request() -> None:
    """The exposition parses and holds the request; the endpoint's state is there for people."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as running:
        await running.client.post("/v1/chat/completions", json=chat())
        async with client_of(running.proxy) as client:
            text = (await client.get("/metrics")).text
            state = (await client.get("/endpoints")).json()["clusters"]["default"][0]
    assert 'kvproxy_requests_total{cluster="default",endpoint="a",status="200"} 1.0' in text
    assert (state["id"], state["condition"], state["in_flight"]) == ("a", "up", 0)


async def test_no_admin_route_on_the_public_listener() -> None:
    """Whatever clients ask for goes to an engine or nowhere."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as running:
        for path in ("/metrics", "/endpoints", "/readyz"):
            assert (await running.client.get(path)).headers["x-kvproxy-endpoint"] == "a"


async def test_the_token_is_required_where_there_is_one() -> None:
    """Everything but health; no difference between a wrong token and none."""
    proxy = proxy_of()
    app = AdminApp(proxy.clusters, metrics=proxy.metrics, ready=lambda: True, clock=lambda: 0.0)
    async with Server(app.build(SecretStr("s3cret"))) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/healthz")).status_code == 200
        refused = [
            await client.get("/metrics"),
            await client.get("/metrics", headers={"authorization": "Bearer wrong"}),
        ]
        assert [answer.status_code for answer in refused] == [401, 401]
        assert refused[0].text == refused[1].text
        good = await client.get("/metrics", headers={"authorization": "Bearer s3cret"})
        assert good.status_code == 200
