"""State of the cache: sources, indexes, hot prefixes, leases."""

from __future__ import annotations

import pytest
from starlette.types import Send

from kvproxy.cache.actions.job_queue import Job
from kvproxy.cache.actions.strategies import MAX_PRIORITIES
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.prefix.eviction import Priority
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import serve
from tests.operate.admin.support import admin_of, audited, problems_of, proxy_of
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


async def test_an_operator_gives_prefixes_priorities() -> None:
    """By the name that the audit log gives them, known or not; each change is an audit line, and outlives a reload."""
    proxy = proxy_of()
    assert proxy.kvcache is not None
    name = f"{0xABC:016x}"
    async with proxy, admin_of(proxy) as client:
        with audited() as lines:
            answer = await client.put(f"/cache/priorities/{name}", json={"priority": "operator"})
        assert (answer.status_code, answer.json()) == (200, {"prefix": name, "set": "operator"})
        assert [(line["action"], line["prefix"], line["priority"]) for line in lines] == [
            ("cache.priority", name, "operator")
        ]
        proxy.kvcache.actions.hotness.count_use([0xABC], model="m", cache_salt="", instance="a", now=proxy.clock())
        filters = ["inference_request", {"kvcache": {"lmcache_endpoint": "http://127.0.0.1:9"}}, "router"]
        raw = {"endpoints": {"a": "http://127.0.0.1:1"}, "health": {"active": False}, "filters": filters}
        await proxy.reload(load_config(raw))
        [shown] = (await client.get("/cache/priorities")).json()["prefixes"]
        assert (shown["prefix"], shown["set"], shown["priority"], shown["uses"]) == (name, "operator", "operator", 1)
        assert proxy.metrics.registry.get_sample_value("kvproxy_queue_depth", {"queue": "priorities"}) == 1
        await client.put(f"/cache/priorities/{name}", json={"priority": "normal"})
        [shown] = (await client.get("/cache/priorities")).json()["prefixes"]
        assert (shown["set"], shown["priority"]) == ("normal", "normal")


@pytest.mark.parametrize(
    ("name", "body", "status", "where"),
    [
        ("xyz", {"priority": "operator"}, 404, "prefix"),
        ("0" * 16, {"priority": "highest"}, 422, "priority"),
        ("0" * 16, {"priority": ["operator"]}, 422, "priority"),
        ("0" * 16, {}, 422, "priority"),
        ("0" * 16, {"priority": "normal", "for": "ever"}, 422, "priority"),
    ],
)
async def test_a_priority_that_is_none_is_refused(name: str, body: dict[str, object], status: int, where: str) -> None:
    async with admin_of(proxy_of()) as client:
        answer = await client.put(f"/cache/priorities/{name}", json=body)
    assert (answer.status_code, list(problems_of(answer))) == (status, [where])


async def test_priorities_are_bounded() -> None:
    """One that is there may be changed all the same."""
    proxy = proxy_of()
    assert proxy.kvcache is not None
    for key in range(MAX_PRIORITIES):
        assert proxy.kvcache.actions.set_priority(key, Priority.CONTRACT)
    async with admin_of(proxy) as client:
        assert (await client.put(f"/cache/priorities/{'f' * 16}", json={"priority": "contract"})).status_code == 409
        assert (await client.put(f"/cache/priorities/{'0' * 16}", json={"priority": "operator"})).status_code == 200
        assert (await client.put(f"/cache/priorities/{'f' * 16}", json={"priority": "normal"})).status_code == 200
