"""LoRA adapters through a whole proxy: found where engines list them, placed by price, asked for elsewhere once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.base.types import EndpointId
from kvproxy.cache.service import KvCache
from kvproxy.cluster.adapters import AdapterState
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.admin.findings import find_lost_adapters
from tests.cache.support import long_text
from tests.lab.simulator.support import TINY
from tests.operate.admin.support import admin_of
from tests.support.fake_engine import Call, FakeEngine, answer_ok, reply
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

MISSING = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}'
FILTERS = ["inference_request", {"kvcache": {"engine_metrics_interval": "1h"}}, "router"]


def with_loras(*names: str, **engine: Any) -> VllmSettings:
    return replace(TINY, loras=names, engine=replace(TINY.engine, **engine))


@contextlib.asynccontextmanager
async def fleet(engines: Mapping[str, VllmSettings], **config: Any) -> AsyncIterator[tuple[Fleet, RunningProxy]]:
    """Run simulated engines behind a proxy that has read their models."""
    async with contextlib.AsyncExitStack() as stack:
        made = await stack.enter_async_context(Fleet(FleetSettings(dict(engines), None), rng=random.Random(1)))
        urls = {name: await stack.enter_async_context(serve(app)) for name, app in made.engines.items()}
        asked: dict[str, Any] = {"policy": "kv_aware", "filters": FILTERS, **config}
        proxy = await stack.enter_async_context(running_proxy(urls, **asked))
        (await proxy.client.get("/v1/models")).raise_for_status()
        yield made, proxy


async def ask(client: httpx.AsyncClient, model: str, text: str = "hello", **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=chat(text, **{"model": model, "max_tokens": 1, **fields}))


def served_by(made: Fleet) -> dict[str, Counter[str]]:
    """Good answers by engine and model."""
    return {
        name: Counter(one["model"] for one in app.state.requests if one["outcome"] == "finished")
        for name, app in made.engines.items()
    }


async def test_adapters_are_found_where_engines_list_them() -> None:
    """Each request goes to an engine that has the adapter; the base model goes everywhere."""
    async with fleet({"a": with_loras("x", "both"), "b": with_loras("y", "both")}) as (made, proxy):
        for _ in range(4):
            for model in ("x", "y", "both", "tiny"):
                assert (await ask(proxy.client, model)).status_code == 200
        served = served_by(made)
        assert (served["a"]["x"], served["a"]["y"], served["b"]["y"], served["b"]["x"]) == (4, 0, 4, 0)
        assert not proxy.metric("kvproxy_retries_total", reason="unknown_model")
        async with admin_of(proxy.proxy) as admin:
            endpoints = (await admin.get("/endpoints")).json()["clusters"]["default"]
        assert proxy.metric("kvproxy_endpoint_adapters", cluster="default", endpoint="b") == 2
        assert [one["adapters"]["served"] for one in endpoints] == [["both", "x"], ["both", "y"]]


async def test_an_adapter_that_is_not_listed_yet_is_found_by_asking() -> None:
    """The first engine does not know it; the client sees the answer of the second."""
    async with fleet({"a": with_loras("x"), "b": with_loras()}, policy="round_robin") as (made, proxy):
        cluster = proxy.proxy.clusters["default"]
        cluster.adapters.observe_list("a", cluster.engines[0].adapters, listed=())
        answers = [await ask(proxy.client, "x", f"{number}") for number in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 6
        assert served_by(made) == {"a": Counter(x=6), "b": Counter()}
        assert proxy.metric("kvproxy_retries_total", reason="unknown_model") >= 1


async def test_a_model_that_no_engine_knows_is_asked_for_twice_at_most() -> None:
    """The engine's own answer goes down."""
    async with fleet({name: with_loras() for name in "abc"}) as (made, proxy):
        answer = await ask(proxy.client, "typo")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        assert sum(app.state.calls["POST /v1/chat/completions"] for app in made.engines.values()) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unloaded_adapter_is_tried_elsewhere_once_and_marked(stream: bool) -> None:
    """Its endpoint is not blamed, and gets no more of its requests until it lists the adapter again."""

    async def unloaded(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 404, MISSING)

    gone, good = FakeEngine("gone", unloaded), FakeEngine("good", answer_ok)
    async with serve(gone) as a, serve(good) as b, running_proxy({"a": a, "b": b}) as proxy:
        cluster = proxy.proxy.clusters["default"]
        for engine in cluster.engines:
            cluster.adapters.observe_list(str(engine.id), engine.adapters, listed=["x"])
        for _ in range(6):
            assert (await ask(proxy.client, "x", stream=stream)).status_code == 200
        assert len(gone.calls) == 1
        assert [one.health.failures for one in cluster.endpoints] == [0, 0]
        assert proxy.metric("kvproxy_attempt_failures_total", cluster="default", endpoint="a", reason="unknown_model")


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b'{"detail":"Not Found"}'), (400, MISSING), (404, b"x" * 100_000)],
)
async def test_other_answers_go_down_as_they_are(status: int, body: bytes) -> None:
    """A path that does not exist is the same everywhere."""

    async def refuse(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, status, body)

    engines = [FakeEngine("a", refuse), FakeEngine("b", refuse)]
    async with serve(engines[0]) as a, serve(engines[1]) as b, running_proxy({"a": a, "b": b}) as proxy:
        answer = await ask(proxy.client, "x")
        assert (answer.status_code, answer.content) == (status, body)
        assert sum(len(engine.calls) for engine in engines) == 1


async def test_without_budget_for_a_retry_the_answer_goes_down() -> None:
    async def unknown(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 404, MISSING)

    engines = [FakeEngine("a", unknown), FakeEngine("b", unknown)]
    async with (
        serve(engines[0]) as a,
        serve(engines[1]) as b,
        running_proxy({"a": a, "b": b}, retry={"attempts": 1}) as proxy,
    ):
        answer = await ask(proxy.client, "x")
    assert (answer.status_code, answer.content) == (404, MISSING)
    assert sum(len(engine.calls) for engine in engines) == 1


async def test_placement_spares_loading() -> None:
    """Two engines of one slot each and two adapters: each engine keeps one, and loads it once."""
    one_slot = with_loras("x", "y", max_loras=1, lora_load_s=0.02)
    async with fleet({"a": one_slot, "b": one_slot}) as (made, proxy):
        kvcache = proxy.proxy.kvcache
        assert kvcache is not None
        for number in range(12):
            for model in ("x", "y"):
                assert (await ask(proxy.client, model, f"{number}", stream=True)).status_code == 200
            await kvcache.scraper.scrape_all()
        served = served_by(made)
        assert sorted(max(one.values()) for one in served.values()) == [12, 12]
        assert all(len(one) == 1 for one in served.values())
        cluster = proxy.proxy.clusters["default"]
        assert [engine.adapters.slots for engine in cluster.engines] == [1, 1]
        assert cluster.adapters.times.samples[AdapterState.ROOM] == 2
        assert cluster.adapters.times.samples[AdapterState.RUNNING] == 22


async def test_adapters_in_use_are_read_from_the_engines_metrics() -> None:
    """Adapters of other clients' requests count as well."""
    async with fleet({"a": with_loras("x", "y", max_loras=2)}) as (made, proxy):
        async with serve(made.engines["a"]) as url, httpx.AsyncClient(base_url=url) as stranger:
            assert (await ask(stranger, "y")).status_code == 200
        kvcache = proxy.proxy.kvcache
        assert kvcache is not None
        await kvcache.scraper.scrape_all()
        (engine,) = proxy.proxy.clusters["default"].engines
        assert engine.adapters.state("y") is AdapterState.RUNNING  # vLLM goes on naming it
        assert engine.adapters.state("x") is AdapterState.ROOM


@pytest.mark.parametrize("events", [False, True])
async def test_the_same_prompt_of_another_adapter_is_another_prompt(events: bool) -> None:
    """Its KV differs: no index takes one for the other, from the first request on."""
    engine = replace(with_loras("x", "y"), kv_events=PublisherSettings() if events else None)
    kvcache = {"kv_events": events, "engine_metrics_interval": "1h"}
    filters = ["inference_request", {"kvcache": kvcache}, "router"]
    async with fleet({"a": engine}, filters=filters) as (_, proxy):
        service = proxy.proxy.kvcache
        assert service is not None
        if events:
            local = service.overlap.indexes["default"]
            await until(lambda: bool(local.exact))
        text = long_text("w", 300)
        for model in ("tiny", "x", "y"):
            assert await _predicted(proxy, service, model, text) == (0, 0)
        for model in ("tiny", "x", "y"):
            predicted, cached = await _predicted(proxy, service, model, text)
            assert cached > 100
            assert predicted == pytest.approx(cached, rel=0.1)


async def test_a_base_models_blocks_are_no_adapters() -> None:
    """Nor before the first event of the adapter: it is known by the engines' lists."""
    engine = replace(with_loras("x"), kv_events=PublisherSettings())
    filters = ["inference_request", {"kvcache": {"kv_events": True, "engine_metrics_interval": "1h"}}, "router"]
    async with fleet({"a": engine}, filters=filters) as (_, proxy):
        service = proxy.proxy.kvcache
        assert service is not None
        local = service.overlap.indexes["default"]
        await until(lambda: bool(local.exact))
        body = {"prompt": list(range(1, 500)), "max_tokens": 1}
        (await proxy.client.post("/v1/completions", json={"model": "tiny", **body})).raise_for_status()
        await until(lambda: local.precise.count_rows(EndpointId("a")) > 10)
        (await proxy.client.post("/v1/completions", json={"model": "x", **body})).raise_for_status()
        async with admin_of(proxy.proxy) as admin:
            last = (await admin.get("/decisions?limit=1")).json()["decisions"][0]
        assert (last["model"], last["matched_tokens"], last["cached_tokens"]) == ("x", 0, 0)


async def _predicted(proxy: RunningProxy, service: KvCache, model: str, text: str) -> tuple[int, int]:
    answer = await ask(proxy.client, model, text)
    await service.actions.jobs.settled()
    await asyncio.sleep(0)
    async with admin_of(proxy.proxy) as admin:
        last = (await admin.get("/decisions?limit=1")).json()["decisions"][0]
    return last["matched_tokens"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_an_operator_is_told_of_an_adapter_that_no_engine_has_any_more() -> None:
    """Until one lists it again; what was learned of loading is shown with the cluster."""
    async with fleet({"a": with_loras("x"), "b": with_loras("x")}) as (_, proxy), admin_of(proxy.proxy) as admin:
        cluster = proxy.proxy.clusters["default"]
        assert (await admin.get("/routing")).json()["clusters"]["default"]["adapters"]["full"] == {
            "seconds": 1.0,
            "samples": 0,
        }
        for engine in cluster.engines:
            cluster.adapters.record_missing(str(engine.id), engine.adapters, "x")
        (finding,) = find_lost_adapters(proxy.proxy.clusters)
        assert finding.what == "no engine serves the adapter x any longer: its requests fail"
        findings = (await admin.get("/live")).json()["findings"]
        assert finding.what in [one["what"] for one in findings]
        cluster.adapters.observe_list("a", cluster.engines[0].adapters, listed=["x"])
        assert list(find_lost_adapters(proxy.proxy.clusters)) == []
