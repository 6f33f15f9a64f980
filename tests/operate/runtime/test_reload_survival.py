"""Objects that outlive a reload that changes a cluster's policy, queue or health checks, each for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.base.types import EndpointId
from kvproxy.cache.service import KvCache
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.routing.work import features_of
from kvproxy.features.kv_events.streams import EventStreams
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import serve
from tests.cache.fleet import simulated
from tests.cache.support import long_text
from tests.operate.admin.support import admin_of
from tests.support.fake_engine import Call, FakeEngine, answer_ok
from tests.support.picks import pick_endpoint
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

#: Each changes one thing about the cluster `default` of `raw`.
CHANGES: list[dict[str, Any]] = [
    {"policy": "least_ttft"},
    {"queue": {"limit": 7}},
    {"health": {"active": False, "eject_for": "99s"}},
    {"max_in_flight": 99},
    {"discovery": {"dns": {"host": "127.0.0.1", "port": 9}}},
]
TURN = long_text("w", 400)


def raw(endpoints: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {"endpoints": endpoints, "policy": "kv_aware", "health": {"active": False}, **changes}


async def reload(running: RunningProxy, endpoints: dict[str, str], changes: dict[str, Any], **same: Any) -> None:
    await running.proxy.reload(load_config(raw(endpoints, **{**same, **changes})))


def endpoint(running: RunningProxy, name: str) -> Endpoint:
    found = running.proxy.clusters["default"].find_endpoint(EndpointId(name))
    assert found is not None
    return found


def service(running: RunningProxy) -> KvCache:
    assert running.proxy.kvcache is not None
    return running.proxy.kvcache


@contextlib.asynccontextmanager
async def two_engines(**behave: Any) -> AsyncIterator[tuple[RunningProxy, dict[str, str]]]:
    async with (
        serve(FakeEngine("a", **behave)) as a,
        serve(FakeEngine("b", **behave)) as b,
        running_proxy({"a": a, "b": b}, policy="kv_aware") as running,
    ):
        yield running, {"a": a, "b": b}


@pytest.mark.parametrize("changes", CHANGES)
async def test_indexes(changes: dict[str, Any]) -> None:
    """A prompt is still known to be where it went, and the next turn goes there."""
    async with two_engines() as (running, urls):
        first = await running.client.post("/v1/chat/completions", json=chat(TURN))
        went = first.headers["x-kvproxy-endpoint"]
        local = service(running).overlap.indexes["default"]
        held = local.approximate.counts.held_blocks(EndpointId(went))
        assert held > 0
        await reload(running, urls, changes)
        assert service(running).overlap.indexes["default"] is local
        assert local.approximate.counts.held_blocks(EndpointId(went)) == held
        headers = {"x-kvproxy-debug": "1"}
        again = await running.client.post("/v1/chat/completions", json=chat(TURN), headers=headers)
        assert again.headers["x-kvproxy-endpoint"] == went
        assert f"matched={went}:" in again.headers["x-kvproxy-decision"]


@pytest.mark.parametrize("changes", CHANGES)
async def test_learned_speeds(changes: dict[str, Any]) -> None:
    """Of the pool, and how each endpoint stands to it."""
    async with two_engines() as (running, urls):
        policy: Any = running.proxy.clusters["default"].policies.own.policy
        policy.observe_sample(EndpointId("a"), features_of(8000, 0), 4.0, running.proxy.clock())
        policy.observe_sample(EndpointId("b"), features_of(8000, 0), 2.0, running.proxy.clock())
        now = running.proxy.clock()
        learned = policy.speeds.estimates(now)
        await reload(running, urls, changes)
        speeds = running.proxy.clusters["default"].speeds
        assert speeds is not None
        assert speeds.estimates(now) == learned


@pytest.mark.parametrize("changes", CHANGES)
async def test_health_and_breakers(changes: dict[str, Any]) -> None:
    """An endpoint that was ejected or cut off by its breaker stays out for as long as it would have."""
    async with two_engines() as (running, urls):
        cluster, now = running.proxy.clusters["default"], running.proxy.clock()
        out = endpoint(running, "a")
        out.health.eject(now)
        for _ in range(5):
            out.breaker.admit().record_failure()
        until_s = out.health.ejected_until
        await reload(running, urls, changes)
        assert running.proxy.clusters["default"] is cluster
        assert endpoint(running, "a") is out
        assert (out.health.ejected_until, out.breaker.state) == (until_s, "open")
        assert out.condition(running.proxy.clock()) is Condition.EJECTED


@pytest.mark.parametrize("changes", CHANGES)
async def test_requests_in_flight(changes: dict[str, Any]) -> None:
    """They count where they are, and count out there."""
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    async with two_engines(behave=slow) as (running, urls):
        both = [endpoint(running, name) for name in ("a", "b")]
        asked = asyncio.create_task(running.client.post("/v1/chat/completions", json=chat()), name="asked")
        await until(lambda: sum(one.load.in_flight for one in both) == 1)
        await reload(running, urls, changes)
        assert [endpoint(running, name) for name in ("a", "b")] == both
        assert sum(one.load.in_flight for one in both) == 1
        go_on.set()
        assert (await asked).status_code == 200
        await until(lambda: sum(one.load.in_flight for one in both) == 0)


@pytest.mark.parametrize("changes", CHANGES)
async def test_event_streams_and_pins(changes: dict[str, Any]) -> None:
    """The same subscribers go on, what they said is still known, and leases run on."""
    strategy = {"enable_pinning": True, "hot_content_threshold": 1}
    kvcache = {
        "lookup_routing_timeout": "60s",
        "request_timeout": "60s",
        "engine_metrics_interval": 0,
        "kv_events": True,
    }
    async with simulated(engine={"kv_events": PublisherSettings()}) as place:
        settings = {**kvcache, "lmcache_endpoint": place.lmcache, "cache_strategy": strategy}
        filters = ["inference_request", {"kvcache": settings}, "router"]
        async with running_proxy(place.engines, policy="kv_aware", filters=filters) as running:
            before = service(running)
            local, streams = before.overlap.indexes["default"], before.overlap.reports
            assert isinstance(streams, EventStreams)
            await until(lambda: set(local.exact) == {"a", "b"})
            body = {"model": "tiny", "messages": [{"role": "user", "content": TURN}], "max_tokens": 1}
            answer = await running.client.post("/v1/chat/completions", json=body)
            went = endpoint(running, answer.headers["x-kvproxy-endpoint"])
            await until(lambda: local.precise.count_rows(went.id) > 0)
            await until(lambda: len(before.overlap.store.list_pins(running.proxy.clock())) == 1)
            rows, followed = local.precise.count_rows(went.id), streams.streams(went)
            await reload(running, place.engines, changes, filters=filters)
            assert service(running) is before
            assert (local.precise.count_rows(went.id), set(local.exact)) == (rows, {"a", "b"})
            assert streams.streams(went) == followed
            await streams.follow_endpoints()
            assert streams.streams(went) == followed
            assert len(before.overlap.store.list_pins(running.proxy.clock())) == 1


async def test_pins_when_other_settings_of_the_cache_change() -> None:
    """The leases run on in the new service, which renews them."""

    def filters(lmcache: str, **changes: Any) -> list[Any]:
        strategy = {"enable_pinning": True, "hot_content_threshold": 1}
        patient = {"lookup_routing_timeout": "60s", "request_timeout": "60s", "engine_metrics_interval": 0}
        cache = {"lmcache_endpoint": lmcache, "cache_strategy": strategy, **patient, **changes}
        return ["inference_request", {"kvcache": cache}, "router"]

    async with (
        simulated() as place,
        running_proxy(place.engines, policy="kv_aware", filters=filters(place.lmcache)) as running,
    ):
        before = service(running)
        body = {"model": "tiny", "messages": [{"role": "user", "content": TURN}], "max_tokens": 1}
        await running.client.post("/v1/chat/completions", json=body)
        await until(lambda: len(before.overlap.store.list_pins(running.proxy.clock())) == 1)
        (pinned,) = before.overlap.store.list_pins(running.proxy.clock())
        await reload(running, place.engines, {}, filters=filters(place.lmcache, min_matched_tokens=7))
        assert service(running) is not before
        assert list(service(running).overlap.store.list_pins(running.proxy.clock())) == [pinned]


async def test_event_streams_when_other_settings_of_the_cache_change() -> None:
    """The service is another one, and what the engines announced is known to it at once."""

    def settings(**changes: Any) -> list[Any]:
        cache = {"engine_metrics_interval": 0, "kv_events": True, **changes}
        return ["inference_request", {"kvcache": cache}, "router"]

    async with (
        simulated(engine={"kv_events": PublisherSettings()}) as place,
        running_proxy(place.engines, policy="kv_aware", filters=settings()) as running,
    ):
        before = service(running)
        streams = before.overlap.reports
        assert isinstance(streams, EventStreams)
        await until(lambda: before.overlap.indexes["default"].exact == {"a", "b"})
        body = {"model": "tiny", "messages": [{"role": "user", "content": TURN}], "max_tokens": 1}
        answer = await running.client.post("/v1/chat/completions", json=body)
        went = endpoint(running, answer.headers["x-kvproxy-endpoint"])
        await until(lambda: before.overlap.indexes["default"].precise.count_rows(went.id) > 0)
        await reload(running, place.engines, {}, filters=settings(min_matched_tokens=7))
        after = service(running)
        assert after is not before
        assert after.overlap.reports is streams
        local = after.overlap.indexes["default"]
        assert local.exact == {"a", "b"}
        assert local.precise.count_rows(went.id) > 0
        await until(lambda: running.proxy.generations.ended == 1)
        assert set(streams.streams(went)) == {0}
        await reload(running, place.engines, {}, filters=settings(request_timeout="9s"))
        assert service(running).overlap.reports is not streams
        await until(lambda: service(running).overlap.indexes["default"].exact == {"a", "b"})
        await until(lambda: running.proxy.generations.ended == 2)
        assert streams.streams(went) == {}


async def test_runtime_changes_of_endpoints() -> None:
    """Endpoints that an operator drained, weighed, added or removed stay so; a weight that the file changes is the
    file's."""
    async with two_engines() as (running, urls):
        async with admin_of(running.proxy) as admin:
            await admin.post("/endpoints", json={"id": "c", "url": "http://127.0.0.1:9"})
            await admin.post("/endpoints/default/c/drain")
            for name in ("a", "b"):
                await admin.post(f"/endpoints/default/{name}/weight", json={"weight": 3})
        heavier = {"a": {"url": urls["a"]}, "b": {"url": urls["b"], "weight": 5}}
        entries = [{"id": name, **fields} for name, fields in heavier.items()]
        await running.proxy.reload(load_config({**raw({}), "endpoints": entries, "policy": "round_robin"}))
        assert [(one.id, one.weight) for one in running.proxy.clusters["default"].endpoints] == [
            ("a", 3), ("b", 5), ("c", 1),
        ]  # fmt: skip
        assert endpoint(running, "c").draining


async def test_rate_limits() -> None:
    """No client gets a fresh start, whether the limits changed or not."""

    def limited(per_minute: int) -> list[Any]:
        return [{"rate_limit": {"requests_per_minute": per_minute}}, "inference_request", "router"]

    async with serve(FakeEngine("a")) as a, running_proxy({"a": a}, filters=limited(2)) as running:
        for _ in range(2):
            await running.client.post("/v1/chat/completions", json=chat())
        for per_minute, policy in ((2, "random"), (4, "round_robin")):
            filters = limited(per_minute)
            await running.proxy.reload(load_config(raw({"a": a}, policy=policy, filters=filters)))
            assert (await running.client.post("/v1/chat/completions", json=chat())).status_code == 429


async def test_requests_in_the_router_queue_go_on_waiting() -> None:
    """Through a reload that changes its bounds, until it is placed."""
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    engine = FakeEngine("a", slow)
    async with serve(engine) as a, running_proxy({"a": a}, policy="kv_aware", queue={}) as running:
        asked = [
            asyncio.create_task(running.client.post("/v1/chat/completions", json=chat("word " * 40_000, stream=True)))
            for _ in range(2)
        ]
        room = running.proxy.clusters["default"].queue
        assert room is not None
        await until(lambda: len(room) == 1)
        await reload(running, {"a": a}, {"queue": {"limit": 3}})
        assert (running.proxy.clusters["default"].queue, len(room)) == (room, 1)
        await reload(running, {"a": a}, {"policy": "round_robin"})
        await until(lambda: len(engine.calls) == 2)
        go_on.set()
        assert [(await one).status_code for one in asked] == [200, 200]


async def test_a_verdict_from_before_the_reload_counts_after_it() -> None:
    """A request that began before it fails after it, and its endpoint is to blame."""
    async with two_engines() as (running, urls):
        cluster = running.proxy.clusters["default"]
        pick = pick_endpoint(cluster, PickRequest(preferred=EndpointId("a")), now=running.proxy.clock())
        assert pick is not None
        await reload(running, urls, CHANGES[0])
        pick.settle(AttemptOutcome.FAILURE, running.proxy.clock())
        assert endpoint(running, "a").health.failures == 1
