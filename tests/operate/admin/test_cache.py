"""State of the cache: sources, indexes, hot prefixes, leases."""

from __future__ import annotations

import pytest
from starlette.types import Send

from kvproxy.cache.actions.job_queue import Job
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.proxy.listener.server import serve
from tests.operate.admin.support import admin_of, problems_of, proxy_of
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.proxy import chat, running_proxy


async def test_status_after_requests() -> None:
    """Sizes, each endpoint's part and worth, counters by outcome, breakers and queues."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware") as running:
        for _ in range(2):
            await running.client.post("/v1/chat/completions", json=chat("x" * 4000))
        async with admin_of(running.proxy) as client:
            status = (await client.get("/cache/status")).json()
    assert status["sources"] == {"approximate": True, "precise": False, "lookup": None}
    index = status["indexes"]["default"]
    assert index["approximate"]["entries"] > 0
    assert index["approximate"]["estimated_bytes"] > 8 * index["approximate"]["entries"]
    endpoint = index["endpoints"]["a"]
    assert (endpoint["state"], endpoint["streams"]) == ("approximate", [])
    assert 0 < endpoint["approximate_blocks"] <= endpoint["approximate_capacity_blocks"]
    assert status["background"] == {"waiting": 0, "limit": 1024, "running": []}
    assert status["predictions"]["predicted_tokens"]["approximate"] > 0
    assert status["predictions"]["reused_tokens"]["approximate"] == 4
    assert status["token_memory"]["limit_bytes"] == 64 * 1024 * 1024
    assert status["switched_off"] == []


async def test_hot_prefixes_are_hashes_with_their_holders() -> None:
    """The most touched first; no text of any prompt."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, b"{}")  # without a count of reused tokens, which would contradict what is believed

    engine = FakeEngine("a", behave)
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware") as running:
        for tail in ("one", "two", "three"):
            content = "shared " * 400 + tail * 300
            await running.client.post("/v1/chat/completions", json=chat(content))
        async with admin_of(running.proxy) as client:
            answer = await client.get("/cache/hot", params={"limit": 2})
    first, second = answer.json()["prefixes"]
    assert first["touches"] > second["touches"]
    assert first["blocks"] < second["blocks"]
    assert first["replicas"] == {"a": first["blocks"]}
    assert first["hot"]
    assert not second["hot"]
    assert len(first["prefix"]) == 16
    assert "shared" not in answer.text


async def test_running_work() -> None:
    """Jobs with what they do where."""
    proxy = proxy_of()
    assert proxy.kvcache is not None
    background = proxy.kvcache.actions.jobs

    async def work() -> bool:
        async with admin_of(proxy) as client:
            seen.append((await client.get("/cache/status")).json()["background"]["running"])
        return True

    seen: list[object] = []
    async with background:
        background.submit(Job("k", work, lane="i1", about="pin 0abc"))
        await background.settled()
    assert seen == [[{"about": "pin 0abc", "instance": "i1"}]]
    assert background.running == ()


async def test_no_leases_without_pinning() -> None:
    """An empty list, not an error."""
    async with admin_of(proxy_of()) as client:
        assert (await client.get("/cache/leases")).json() == {"leases": [], "promises": None}


async def test_engine_readings_are_shown_with_their_age() -> None:
    """The latest scrape of each."""
    proxy = proxy_of()
    assert proxy.kvcache is not None
    endpoint = proxy.clusters["default"].endpoints[0]
    async with admin_of(proxy) as client:
        assert (await client.get("/endpoints")).json()["clusters"]["default"][0]["engine"] is None
        proxy.kvcache.scraper.signals.note_scrape(endpoint, EngineMetrics(kv_usage=0.5, waiting=2, running=3))
        shown = (await client.get("/endpoints")).json()["clusters"]["default"][0]["engine"]
    assert (shown["kv_usage"], shown["waiting"], shown["running"], shown["age_s"]) == (0.5, 2, 3, 0.0)


@pytest.mark.parametrize("path", ["/cache/status", "/cache/hot", "/cache/leases", "/cache/priorities"])
async def test_without_the_filter(path: str) -> None:
    """404 that says how to get it."""
    async with admin_of(proxy_of(policy="random", filters=["inference_request", "router"])) as client:
        answer = await client.get(path)
    assert (answer.status_code, problems_of(answer)["filters"][0]) == (404, "there is no kvcache filter, or it is off")
