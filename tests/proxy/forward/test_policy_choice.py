"""A client names the policy for its request, where the operator lets it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.app import Proxy
from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.simple import RoundRobin
from kvproxy.operate.config.load import load_config
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loopback import Server, serve
from tests.support.proxy import RunningProxy, chat, running_proxy

PATH, HEADER = "/v1/chat/completions", "x-kvproxy-policy"


@contextlib.asynccontextmanager
async def gateway(**config: Any) -> AsyncIterator[tuple[RunningProxy, list[FakeEngine]]]:
    """Two engines behind a proxy that goes round."""
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with contextlib.AsyncExitStack() as stack:
        urls = {engine.name: await stack.enter_async_context(serve(engine)) for engine in engines}
        yield await stack.enter_async_context(running_proxy(urls, **config)), engines


async def test_the_named_policy_decides() -> None:
    """The decision header and the metrics name it; the engine does not hear of it."""
    async with gateway(client_policies=["kv_aware"]) as (running, engines):
        headers = {HEADER: "kv_aware", "x-kvproxy-debug": "1"}
        answers = [await running.client.post(PATH, json=chat("long " * 500), headers=headers) for _ in range(4)]
        assert len({answer.headers["x-kvproxy-endpoint"] for answer in answers}) == 1
        assert {answer.headers["x-kvproxy-decision"].split(";")[0] for answer in answers} == {"policy=kv_aware"}
        plain = [await running.client.post(PATH, json=chat()) for _ in range(2)]
        assert len({answer.headers["x-kvproxy-endpoint"] for answer in plain}) == 2
        assert {call.header(HEADER) for engine in engines for call in engine.calls} == {None}
        assert next(running.proxy.recent.latest()).outcome.policy == "round_robin"


@pytest.mark.parametrize("name", ["kv_aware", "nonsense", "x" * 5000, "\u00e9"])
async def test_policies_not_on_offer_are_refused(name: str) -> None:
    """With what is; nothing is sent to an engine, and the answer repeats only so much of the name."""
    async with gateway(client_policies=["least_request", "random"]) as (running, engines):
        answer = await running.client.post(PATH, json=chat(), headers={HEADER: name.encode("latin-1")})  # type: ignore[dict-item]
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "policy_not_offered"
        assert error["message"].endswith("these are: round_robin, least_request, random.")
        assert len(error["message"]) < 250
        assert [engine.calls for engine in engines] == [[], []]
        assert running.metric("kvproxy_local_replies_total", status="400", reason="policy_not_offered") == 1


async def test_a_cluster_without_an_offer_says_so_beside_one_with() -> None:
    """Where some cluster lets clients choose, a wish that cannot be granted is never passed over in silence."""
    async with gateway() as (running, _), gateway(client_policies=["random"]) as (other, _):
        clusters = {
            "closed": {"endpoints": {"a": running.url}, "health": {"active": False}},
            "open": {"endpoints": {"a": other.url}, "client_policies": ["random"], "health": {"active": False}},
        }
        routes = [{"prefix": "/v1/chat", "cluster": "closed"}, {"prefix": "/v1/completions", "cluster": "open"}]
        config = load_config({"clusters": clusters, "routes": routes})
        async with Proxy(config) as proxy, Server(proxy) as server, httpx.AsyncClient(base_url=server.url) as both:
            refused = await both.post(PATH, json=chat(), headers={HEADER: "random"})
            assert "cannot choose one here" in refused.json()["error"]["message"]
            granted = await both.post("/v1/completions", json={"prompt": "x"}, headers={HEADER: "random"})
            assert granted.status_code == 200


async def test_where_no_cluster_offers_any_the_header_is_dropped() -> None:
    """It is not looked at."""
    async with gateway() as (running, engines):
        answer = await running.client.post(PATH, json=chat(), headers={HEADER: "nonsense"})
        assert answer.status_code == 200
        assert engines[0].calls[0].header(HEADER) is None


async def test_an_empty_header_names_no_policy() -> None:
    """The cluster's own decides."""
    async with gateway(client_policies=["least_request"]) as (running, _):
        assert (await running.client.post(PATH, json=chat(), headers={HEADER: ""})).status_code == 200


async def test_a_named_policy_decides_without_the_kvcache_filters_preference() -> None:
    """A client that asks for a policy gets it, not the endpoint that holds most."""
    filters = ["request_id", "inference_request", {"kvcache": {"prefer": True, "min_matched_tokens": 1}}, "router"]
    async with gateway(client_policies=["round_robin"], policy="least_request", filters=filters) as (running, _):
        body = chat("the same long question " * 200)
        preferring = [await running.client.post(PATH, json=body) for _ in range(4)]
        assert len({answer.headers["x-kvproxy-endpoint"] for answer in preferring}) == 1
        named = [await running.client.post(PATH, json=body, headers={HEADER: "round_robin"}) for _ in range(4)]
        assert len({answer.headers["x-kvproxy-endpoint"] for answer in named}) == 2


async def test_reported_reuse_reaches_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the usage of its answer, for the endpoint that gave it; of an answer without one nothing is said."""
    told: list[tuple[str, int, int]] = []

    def observe(self: RoundRobin, endpoint: EndpointId, predicted: int, cached: int, now: float) -> None:
        told.append((endpoint, predicted, cached))

    async def without_usage(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, b"{}")

    monkeypatch.setattr(RoundRobin, "observe_reuse", observe)
    async with gateway() as (running, engines):
        answers = [await running.client.post(PATH, json=chat()) for _ in range(2)]
        assert told == [(answer.json()["served_by"], 0, 4) for answer in answers]
        for engine in engines:
            engine.behave = without_usage
        await running.client.post(PATH, json=chat())
        assert len(told) == 2
