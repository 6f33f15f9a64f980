"""Strategies through a whole proxy, before a simulated LMCache."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from kvproxy.cluster.settings import PolicyName
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.proxy.filters.kvcache import prefers
from tests.cache.fleet import simulated
from tests.cache.support import NOWHERE, long_text, settings
from tests.features.lmcache.support import proxied
from tests.lab.simulator.support import slow
from tests.proxy.filters.test_kvcache import TURN, ask, body, service
from tests.support.until import until

PIN = {"enable_pinning": True, "hot_content_threshold": 2}


async def test_a_hot_prompt_is_pinned_where_it_was_served(caplog: pytest.LogCaptureFixture) -> None:
    """After the answer, with an effect one can see at the controller, and a line in the audit log."""
    async with simulated() as place, proxied(place, cache_strategy=PIN) as proxy:
        with caplog.at_level(logging.INFO, "kvproxy.audit"):
            served = [await ask(proxy, TURN) for _ in range(2)]
            await until(lambda: service(proxy).actions.jobs.idle)
        assert place.fleet.controller is not None
        pinned = {n: w.stores["LocalCPUBackend"].pins for n, w in place.fleet.controller.workers.items()}
        assert pinned[served[1]] > 0
        assert sum(pinned.values()) == pinned[served[1]]
        assert "action=pin" in caplog.text
        assert "result=done" in caplog.text
        assert re.search(r"reason=hot score=0\.\d+ ", caplog.text)
        assert "w1 w2" not in caplog.text


async def test_the_client_leaving_does_not_end_the_work_after_it() -> None:
    """The KV exists since the first byte: the prompt is tokenized and pinned although no client listens any more."""
    strategy = {**PIN, "hot_content_threshold": 1}
    async with simulated(engine={"engine": slow()}) as place, proxied(place, cache_strategy=strategy) as proxy:
        streaming = body(TURN, stream=True, max_tokens=1000)
        async with proxy.client.stream("POST", "/v1/chat/completions", json=streaming) as answer:
            async for _ in answer.aiter_bytes():
                break
        await until(lambda: place.calls["POST /pin"] == 1)
        assert proxy.metric("kvproxy_request_ends_total", end="client_disconnected") == 1


async def test_leaving_drains_what_was_queued() -> None:
    async with simulated() as place:
        async with proxied(place, cache_strategy={**PIN, "hot_content_threshold": 1}) as proxy:
            await ask(proxy, TURN)
        assert place.calls["POST /pin"] == 1


async def test_a_worker_that_never_answers_holds_up_nobody() -> None:
    """The controller hangs for ever on a dead worker; requests go on, and each attempt ends by a timeout."""
    async with simulated() as place:
        limits = {"request_timeout": 1.0}
        strategy = {**PIN, "hot_content_threshold": 1}
        async with proxied(place, cache_strategy=strategy, **limits) as proxy:
            assert place.fleet.controller is not None
            for worker in place.fleet.controller.workers.values():
                worker.kill()
            await ask(proxy, TURN)
            await until(lambda: place.calls["POST /pin"] > 1)  # the first attempt has ended
            assert await ask(proxy, TURN, "an answer", "more")


async def test_memory_pressure_without_evict_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The real controller answers 404; nothing is cleared unless asked for."""
    strategy = {"enable_eviction": True, "memory_threshold": 0.0}
    async with simulated() as place, proxied(place, cache_strategy=strategy, engine_metrics_interval="1h") as proxy:
        await service(proxy).scraper.scrape_all()
        for tag in "pqrstu":
            await ask(proxy, long_text(tag, 400))
            await until(lambda: service(proxy).actions.jobs.idle)
        assert place.calls["POST /evict"] == 1
        assert place.calls["POST /clear"] == 0
        assert caplog.text.count("cannot evict a single prefix") == 1
        assert proxy.metric("kvproxy_kvcache_actions_total", action="evict", result="not_supported") == 1


async def test_a_compressed_prefix_is_decompressed_before_it_is_used() -> None:
    """Cold under load: compressed. Wanted again: not preferred there until it is decompressed."""
    strategy = {"enable_compression": True, "load_threshold": 0.0}
    async with simulated(names=("a",)) as place, proxied(place, cache_strategy=strategy) as proxy:
        under_test = service(proxy)
        await under_test.scraper.scrape_all()
        await ask(proxy, TURN)
        await ask(proxy, long_text("z", 400))
        await until(lambda: place.calls["POST /compress"] == 1)
        await until(lambda: under_test.actions.jobs.idle)
        await ask(proxy, TURN, "an answer", "again")
        await until(lambda: place.calls["POST /decompress"] == 1)


@pytest.mark.parametrize(
    "fleet", [{}, {"controller": None, "coordinator": CoordinatorSettings()}], ids=["controller", "coordinator"]
)
async def test_a_chat_stays_where_its_prefix_is(fleet: dict[str, Any]) -> None:
    """Round robin would alternate; the lookup tells the two instances apart, with either LMCache service."""
    async with simulated(**fleet) as place, proxied(place, directory_model="models/tiny-qwen") as proxy:
        history = [TURN]
        first = await ask(proxy, *history)
        for turn in range(4):
            history += ["an answer", f"question {turn}"]
            assert await ask(proxy, *history) == first
        other = await ask(proxy, long_text("z", 400))
        assert other != first
        assert proxy.metric("kvproxy_preferences_total", result="followed") == 4
        assert proxy.metric("kvproxy_kvcache_lookups_total", outcome="hit") == 4


async def test_the_engine_confirms_what_was_predicted() -> None:
    """`cached_tokens` of the answer against the prediction, by source."""
    async with simulated() as place, proxied(place) as proxy:
        await ask(proxy, TURN)
        await ask(proxy, TURN, "an answer", "more")
        results = [
            proxy.metric(
                "kvproxy_kvcache_predictions_total", cluster="default", endpoint=name, source=source, result="hit"
            )
            for source in ("approximate", "lmcache_controller")
            for name in place.engines
        ]
        assert sum(results) == 1


def test_a_lookup_overrules_policies_that_weigh_no_prefixes() -> None:
    """Unless the settings state otherwise."""
    assert prefers(settings(lmcache_endpoint=NOWHERE), PolicyName.ROUND_ROBIN)
    assert not prefers(settings(lmcache_endpoint=NOWHERE), PolicyName.KV_AWARE)
    assert not prefers(settings(prefer=False, lmcache_endpoint=NOWHERE), PolicyName.ROUND_ROBIN)
