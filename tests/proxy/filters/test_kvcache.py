"""The kvcache filter in a whole proxy, over simulated engines."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.routes import Routes
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts
from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.kvcache import STATE_KEY, KvCacheFilter, build, needs_facts, prefers
from kvproxy.proxy.request.exchange import Exchange
from tests.cache.fleet import simulated
from tests.cache.support import NOWHERE, cluster_of, long_text, settings
from tests.support.asgi import Inner, call, http_scope
from tests.support.fake_engine import Call, FakeEngine, answer_ok
from tests.support.filter_context import filter_context
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy

TURN = long_text("w", 400)


def service(proxy: RunningProxy) -> KvCache:
    """Return the proxy's kvcache service."""
    kvcache = proxy.proxy.kvcache
    assert kvcache is not None
    return kvcache


def body(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return {"model": "tiny", "messages": messages, "max_tokens": 1, **fields}


async def ask(proxy: RunningProxy, *contents: str) -> str:
    """Send a request and return the endpoint that answered."""
    answer = await proxy.client.post("/v1/chat/completions", json=body(*contents))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvproxy-endpoint"]


def test_which_policies_a_preference_overrules() -> None:
    """None without a lookup service, unless the settings state it."""
    assert not prefers(settings(), PolicyName.ROUND_ROBIN)
    assert prefers(settings(prefer=True), PolicyName.KV_AWARE)


async def test_round_robin_stays_round_robin_without_a_lookup_service() -> None:
    """The filter is in the default chain: it informs, and changes nothing that was not asked for."""
    async with simulated() as place, running_proxy(place.engines, client_policies=["kv_aware"]) as proxy:
        assert [await ask(proxy, TURN) for _ in range(4)] == ["a", "b", "a", "b"]
        answer = await proxy.client.post("/v1/chat/completions", json=body(TURN), headers={"x-kvproxy-debug": "1"})
        assert "/approximate" in answer.headers["x-kvproxy-decision"]


async def test_facts_that_nothing_would_use_are_not_gathered() -> None:
    """Under a policy that weighs no overlap the default chain neither hashes nor learns."""
    async with simulated() as place, running_proxy(place.engines) as proxy:
        assert [await ask(proxy, TURN) for _ in range(2)] == ["a", "b"]
        assert service(proxy).overlap.indexes["default"].approximate.counts.entries == 0
        assert proxy.metric("kvproxy_kvcache_facts_seconds_count") == 0


@pytest.mark.parametrize(
    ("kvcache", "cluster", "needed"),
    [
        ({}, {}, False),
        ({"prefer": False}, {}, False),
        ({}, {"policy": "power_of_two", "client_policies": ["random"]}, False),
        ({}, {"policy": "kv_aware"}, True),
        ({}, {"client_policies": ["least_request", "kv_aware"]}, True),
        ({"prefer": True}, {}, True),
        ({"preference_header": "x-preferred"}, {}, True),
    ],
)
def test_policies_that_need_facts(kvcache: dict[str, Any], cluster: dict[str, Any], needed: bool) -> None:
    """Any policy that may decide, look on or be asked for, and everything that is made of facts besides."""
    chosen = ClusterSettings.model_validate({"policy": "round_robin", **cluster})
    assert needs_facts(KvCacheSettings.model_validate(kvcache), chosen) is needed


async def test_kv_aware_weighs_the_facts_itself() -> None:
    async with simulated() as place, running_proxy(place.engines, policy="kv_aware") as proxy:
        first = await ask(proxy, TURN)
        assert [await ask(proxy, TURN, "x", f"{number}") for number in range(3)] == [first] * 3
        assert proxy.metric("kvproxy_picks_total", cluster="default", policy="kv_aware", reason="overlap") == 3


async def test_a_retry_is_told_of_as_a_pick_of_its_own() -> None:
    """The failed endpoint's assumed blocks are taken back."""

    async def broken(engine: FakeEngine, call: Call, send: Any) -> None:
        raise RuntimeError("down")

    bad, good = FakeEngine("bad", broken), FakeEngine("good", answer_ok)
    async with (
        serve(bad) as a,
        serve(good) as b,
        running_proxy({"a": a, "b": b}, client_policies=["kv_aware"]) as proxy,
    ):
        assert await ask(proxy, TURN) == "b"
        local = service(proxy).overlap.indexes["default"].approximate
        assert local.counts.held_blocks(EndpointId("a")) == 0
        assert local.counts.held_blocks(EndpointId("b")) > 0


# The filter alone


def request(content: str = TURN) -> InferenceRequest:
    return InferenceRequest(RequestKind.CHAT, "m", Prompt(b"", (content.encode(),)))


class Broken:
    """Routes that raise: whatever happens in the filter, the request goes on."""

    def resolve(self, path: str, model: str) -> None:
        raise RuntimeError("a mistake")


class Nowhere:
    """Routes that lead nowhere."""

    def resolve(self, path: str, model: str) -> None:
        return None


def alone(inner: Inner, routes: Any, context: FilterContext) -> KvCacheFilter:
    kv = KvCache(settings(), clusters={}, metrics=context.metrics)
    return KvCacheFilter(inner, kv, routes=routes, prefer={}, metrics=context.metrics, clock=context.clock)


@pytest.mark.parametrize(("routes", "lines"), [(Broken(), 1), (Nowhere(), 0)])
async def test_the_filter_never_fails_a_request(routes: Any, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    inner = Inner()
    scope = http_scope("/v1/chat/completions", method="POST")
    exchange = Exchange.of(scope, now=0.0)
    exchange.inference, exchange.body = request(), b"{}"
    reply = await call(alone(inner, routes, filter_context()), scope)
    assert reply.status == 200
    assert inner.exchange.facts is None
    assert len(caplog.records) == lines


async def test_other_requests_pass() -> None:
    inner = Inner()
    under_test = alone(inner, Broken(), filter_context())
    assert (await call(under_test, http_scope("/v1/models"))).status == 200
    await call(under_test, {"type": "lifespan"})
    assert [scope["type"] for scope in inner.scopes] == ["http", "lifespan"]


def test_switched_off_it_is_not_there() -> None:
    context, inner = filter_context(), Inner()
    assert build(inner, settings(enabled=False), context) is inner
    assert context.lifetimes == []


async def test_the_preferred_endpoint_travels_in_state_and_header_and_no_client_can_set_it() -> None:
    """`llm_preferred_endpoint_id`, for the apps behind it."""
    engine = FakeEngine("only")
    async with serve(engine) as url:
        chosen = {"preference_header": "X-Preferred", "engine_metrics_interval": 0}
        filters = ["inference_request", {"kvcache": chosen}, "router"]
        async with running_proxy({"a": url}, filters=filters) as proxy:
            for content in (TURN, TURN):
                await proxy.client.post(
                    "/v1/chat/completions", json=body(content), headers={"x-preferred": "somebody else"}
                )
    assert [each.header("x-preferred") for each in engine.calls] == [None, "a"]


async def test_the_state_key_is_pixius() -> None:
    assert STATE_KEY == "llm_preferred_endpoint_id"


async def test_a_pick_that_cannot_be_counted_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def stumbling(facts: Any, endpoint: EndpointId) -> None:
        raise RuntimeError("a mistake")

    engine = FakeEngine("only")
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware") as proxy:
        service(proxy).placed = stumbling
        assert await ask(proxy, TURN) == "a"
    assert "KvCacheLearning at `placed`" in caplog.text


async def test_it_starts_and_ends_with_the_proxy() -> None:
    """Its tasks are gone when the proxy is."""
    before = len(asyncio.all_tasks())
    async with simulated(names=("a",)) as place, running_proxy(place.engines, policy="kv_aware") as proxy:
        await ask(proxy, TURN)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert "kvcache watch" in names
    assert len(asyncio.all_tasks()) == before


async def test_facts_come_before_the_client_is_answered_by_plain_httpx() -> None:
    """Bodies of unknown shape are balanced without facts."""
    async with simulated(names=("a",)) as place, running_proxy(place.engines, policy="kv_aware") as proxy:
        answer = await proxy.client.post("/v1/chat/completions", content=b"not json")
        assert answer.status_code == 400
        async with httpx.AsyncClient() as plain:
            assert (await plain.get(f"{proxy.url}/v1/models")).status_code == 200


class Forgetful(KvCache):
    """A service that knows one thing once, and then breaks."""

    def refresh(self, facts: RequestFacts) -> None:
        facts.min_tokens = 1
        facts.overlaps = OverlapFacts(7, {EndpointId("b"): Overlap(7)})
        self.refresh = self._broken  # type: ignore[method-assign]

    def _broken(self, facts: RequestFacts) -> None:
        raise ZeroDivisionError("no facts today")


@pytest.mark.parametrize("prefers_match", [True, False])
async def test_facts_and_preference_are_refreshed_when_the_router_asks(
    prefers_match: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A fact that cannot be refreshed stays as it was, and the request goes on; a preference only where there is to be
    one."""
    cluster = cluster_of({"a": NOWHERE, "b": NOWHERE})
    inner, context = Inner(), filter_context()
    kv = Forgetful(settings(), clusters={"default": cluster}, metrics=context.metrics)
    routes: Any = Routes.from_settings((), {"default": cluster})
    app = KvCacheFilter(
        inner, kv, routes=routes, prefer={"default": prefers_match}, metrics=context.metrics, clock=context.clock
    )
    scope = http_scope("/v1/chat/completions", method="POST")
    exchange = Exchange.of(scope, now=0.0)
    exchange.inference, exchange.body = request(), b"{}"
    await call(app, scope)
    assert exchange.facts_source is not None
    exchange.facts_source(exchange)
    assert exchange.facts is not None
    for _ in range(2):
        assert (exchange.facts.prompt_tokens, exchange.preferred) == (7, "b" if prefers_match else None)
        exchange.facts_source(exchange)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
