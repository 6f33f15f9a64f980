"""Priorities that an operator gives prefixes."""

from __future__ import annotations

import pytest

from kvproxy.cache.prefix.eviction import Priority
from kvproxy.features.lmcache.cold_prefixes import MAX_PRIORITIES, PrefixPriorities
from kvproxy.operate.config.load import load_config
from tests.operate.admin.support import admin_of, audited, problems_of, proxy_of


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
    priorities = proxy.kvcache.state.of(PrefixPriorities)
    for key in range(MAX_PRIORITIES):
        assert priorities.set_priority(key, Priority.CONTRACT)
    async with admin_of(proxy) as client:
        assert (await client.put(f"/cache/priorities/{'f' * 16}", json={"priority": "contract"})).status_code == 409
        assert (await client.put(f"/cache/priorities/{'0' * 16}", json={"priority": "operator"})).status_code == 200
        assert (await client.put(f"/cache/priorities/{'f' * 16}", json={"priority": "normal"})).status_code == 200
