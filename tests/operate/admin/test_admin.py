"""The operator's listener: health, readiness, metrics, and errors that say what to do."""

from __future__ import annotations

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.proxy.listener.server import serve
from tests.operate.admin.support import admin_of, problems_of, proxy_of
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import chat, running_proxy


async def test_health_and_readiness() -> None:
    """Healthy as long as it answers; ready while an endpoint takes traffic and the proxy does not drain."""
    proxy = proxy_of()
    async with admin_of(proxy) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).text == "ready\n"
        proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"))
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "no endpoint in default\n")
        proxy.draining = True
        assert (await client.get("/readyz")).text == "draining\n"


async def test_metrics_and_endpoints_after_a_request() -> None:
    """The exposition parses and holds the request; the endpoint's state is there for people."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as running:
        await running.client.post("/v1/chat/completions", json=chat())
        async with admin_of(running.proxy) as client:
            text = (await client.get("/metrics")).text
            state = (await client.get("/endpoints")).json()["clusters"]["default"][0]
    assert 'kvproxy_requests_total{cluster="default",endpoint="a",status="200"} 1.0' in text
    assert (state["id"], state["condition"], state["in_flight"]) == ("a", "up", 0)


async def test_no_admin_route_on_the_public_listener() -> None:
    """Whatever clients ask for goes to an engine or nowhere."""
    engine = FakeEngine("a")
    filters = [{"router": {"paths": "all"}}]
    async with serve(engine) as url, running_proxy({"a": url}, filters=filters) as running:
        for path in ("/endpoints", "/readyz", "/live", "/config"):
            assert (await running.client.get(path)).json()["served_by"] == "a"


@pytest.mark.parametrize(
    ("method", "path", "status", "fix"),
    [
        ("GET", "/nothing", 404, "docs/admin.md lists what there is"),
        ("GET", "/endpoints/default/a", 405, "allowed: DELETE"),
        ("DELETE", "/routing", 405, "allowed: GET, HEAD"),
        ("PUT", "/endpoints", 405, "allowed: GET, HEAD, POST"),
        ("POST", "/config", 405, "allowed: GET, HEAD"),
    ],
)
async def test_paths_and_methods_there_are_not(method: str, path: str, status: int, fix: str) -> None:
    """JSON that says where and what else there is, with `Allow` on 405."""
    async with admin_of(proxy_of()) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert {part.strip() for part in problems_of(answer)[path][1].removeprefix("allowed: ").split(",")} == {
        part.strip() for part in fix.removeprefix("allowed: ").split(",")
    }
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("body", "status", "what"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 60_000, 400, "not JSON"),
        (b" " * 65_537, 413, "larger than 65536 bytes"),
    ],
)
async def test_bodies_are_bounded_json_objects(body: bytes, status: int, what: str) -> None:
    """Anything else is refused before it is looked at further."""
    async with admin_of(proxy_of()) as client:
        answer = await client.patch("/log", content=body)
    assert answer.status_code == status
    assert what in answer.json()["error"]
    assert problems_of(answer)["(body)"][1]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1e3", "", "²"])
async def test_limits_are_checked(limit: str) -> None:
    """A limit that is none is an error, not a default."""
    async with admin_of(proxy_of()) as client:
        answer = await client.get("/decisions", params={"limit": limit})
    assert (answer.status_code, problems_of(answer)["limit"][1]) == (400, "allowed: 1 to 1000")
