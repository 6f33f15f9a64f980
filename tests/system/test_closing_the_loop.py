"""Reuse by engines through a whole proxy: sources that are wrong lose trust, and that is shown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvproxy.cache.service import KvCache
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from tests.cache.fleet import Place, simulated
from tests.cache.support import long_text
from tests.operate.admin.support import admin_of
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

SAID = long_text("w", 300)
ROUTED_TO_A = {"cluster": "default", "endpoint": "a", "source": "approximate"}


@contextlib.asynccontextmanager
async def proxied(place: Place, **kvcache: Any) -> AsyncIterator[RunningProxy]:
    """Yield a proxy before these engines; readings are taken when a test asks for them."""
    filters = [
        {"request_id": {}},
        "inference_request",
        {"kvcache": {"engine_metrics_interval": "1h", **kvcache}},
        "router",
    ]
    async with running_proxy(place.engines, policy="kv_aware", filters=filters) as proxy:
        yield proxy


def service(proxy: RunningProxy) -> KvCache:
    kvcache = proxy.proxy.kvcache
    assert kvcache is not None
    return kvcache


async def chat(client: httpx.AsyncClient, *contents: str) -> int:
    """Send a chat's turn; returns the tokens its engine reused."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    answer = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 1})
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> tuple[str, int]:
    """Which engine served these tokens, and how many it reused."""
    answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200
    reused = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.headers.get("x-kvproxy-endpoint", ""), reused


async def test_an_engine_that_loses_its_cache_raises_the_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """Said once in the log with numbers, causes and what to do; a finding and a metric show it until it is over."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    async with simulated(names=("a",)) as place, proxied(place) as proxy:
        for number in range(6):
            await chat(proxy.client, f"{number} {SAID}")
        async with httpx.AsyncClient(base_url=place.engines["a"]) as engine:
            (await engine.post("/reset_prefix_cache")).raise_for_status()
        asked = [chat(proxy.client, f"{number} {SAID}", "yes", "more") for number in range(4)]
        assert await asyncio.gather(*asked) == [0] * 4  # at once: predictions end some time after the alarm
        lines = [record.getMessage() for record in caplog.records if "engine reused 0" in record.getMessage()]
        assert len(lines) == 1
        for part in (
            "default/a: predicted ",
            "by routed requests",
            "(request ",
            "3 of the last 8",
            "kvproxy doctor",
        ):
            assert part in lines[0]
        assert proxy.metric("kvproxy_kvcache_predictions_total", **ROUTED_TO_A, result="miss") == 4
        assert proxy.metric("kvproxy_kvcache_prediction_alarm", **ROUTED_TO_A) == 1
        async with admin_of(proxy.proxy) as admin:
            findings = (await admin.get("/live")).json()["findings"]
            (alarm,) = (await admin.get("/cache/status")).json()["predictions"]["alarms"]
        assert any(one["where"] == "default/a" and "engine reused 0" in one["what"] for one in findings)
        assert "4 of the last 8" in alarm["what"]
        for _ in range(8):
            assert await chat(proxy.client, f"0 {SAID}", "yes", "more") > 500
        assert proxy.metric("kvproxy_kvcache_prediction_alarm", **ROUTED_TO_A) == 0
        assert "come true again" in caplog.text


async def test_events_that_prove_wrong_are_believed_less_about_that_endpoint() -> None:
    """A prompt another client sent there, announced, and silently lost: no replay repairs that."""
    engine = {"kv_events": PublisherSettings()}
    prompts = [list(range(start, start + 256)) for start in (1, 301, 601)]
    async with simulated(engine=engine) as place, proxied(place, kv_events=True) as proxy:
        local = service(proxy).overlap.indexes["default"]
        await until(lambda: len(local.exact) == 2)
        async with httpx.AsyncClient(base_url=place.engines["a"]) as stranger:
            for prompt in prompts:
                await complete(stranger, prompt)
        await until(lambda: proxy.metric("kvproxy_kvcache_index_blocks", index="precise") == 24)
        cache = place.fleet.engines["a"].state.runner.engine.scheduler.cache
        cache._record = False  # no event tells of it
        assert cache.clear()
        cache._record = True
        shares = []
        for prompt in prompts:
            await complete(proxy.client, prompt)
            at = {"cluster": "default", "endpoint": "a", "source": "precise"}
            shares.append(proxy.metric("kvproxy_kvcache_trust_ratio", **at))
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[0] < 0.7
        assert shares[-1] < 0.7
        async with admin_of(proxy.proxy) as admin:
            known = (await admin.get("/cache/status")).json()["indexes"]["default"]["endpoints"]
        assert known["a"]["trust"]["precise"] == pytest.approx(shares[-1])
        assert known["b"]["trust"] == {}


async def test_the_engines_own_count_stands_beside_the_prediction() -> None:
    """Per endpoint, and what others sent there is told apart."""
    async with simulated(names=("a",)) as place, proxied(place) as proxy:
        watch = service(proxy).scraper
        at = {"cluster": "default", "endpoint": "a"}
        await watch.scrape_all()
        for turn in range(1, 6):
            await chat(proxy.client, SAID, *["more"] * (2 * turn))
        await watch.scrape_all()
        ratios = {by: proxy.metric("kvproxy_endpoint_cache_hit_ratio", **at, by=by) for by in ("engine", "responses")}
        assert ratios["engine"] == pytest.approx(ratios["responses"], abs=0.01)
        assert 0.6 < ratios["engine"] < 1.0
        predicted = proxy.metric("kvproxy_endpoint_cache_hit_ratio", **at, by="prediction")
        assert predicted == pytest.approx(ratios["engine"], abs=0.15)
        assert proxy.metric("kvproxy_engine_foreign_tokens_ratio", **at) == pytest.approx(0.0, abs=0.01)
        async with httpx.AsyncClient(base_url=place.engines["a"]) as stranger:
            for number in range(5):
                await chat(stranger, f"{number} {SAID}")
        await watch.scrape_all()
        assert proxy.metric("kvproxy_engine_foreign_tokens_ratio", **at) == pytest.approx(0.5, abs=0.1)


async def test_a_cache_that_strangers_fill_is_believed_smaller() -> None:
    """Two chats of others for each of ours: less is kept than the engine's size says."""
    at = {"cluster": "default", "endpoint": "a"}
    async with simulated(names=("a",)) as place, proxied(place) as proxy:
        await chat(proxy.client, SAID)  # tells how long tokens are
        await service(proxy).scraper.scrape_all()
        async with httpx.AsyncClient(base_url=place.engines["a"]) as stranger:
            for number in range(40):
                await chat(proxy.client, f"{number} {SAID}")
                await chat(stranger, f"theirs {number} {SAID}")
                await chat(stranger, f"theirs too {number} {SAID}")
                if number >= 6:
                    await chat(proxy.client, f"{number - 6} {SAID}", "yes", "more")
        told = proxy.metric("kvproxy_kvcache_index_capacity_blocks", **at, kind="told")
        assert 0 < proxy.metric("kvproxy_kvcache_index_capacity_blocks", **at, kind="learned") < told * 0.7
