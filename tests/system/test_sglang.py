"""The proxy in front of simulated SGLang engines: what it finds out, where it sends, and what it makes of answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml

from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.service import KvCache
from kvproxy.cluster.endpoint import Condition
from kvproxy.features.kv_events.streams import EventStreams
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.sglang_server import SglangApp
from kvproxy.lab.simulator.sglang_settings import EventForm, EventSettings, SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from tests.cache.media.samples import picture_part, png
from tests.docs.blocks import block
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

FAST = EngineSettings(512, 16, token_outputs=True, timing=EngineTiming(time_scale=0.001))
QUICK = SglangSettings(engine=FAST, kv_events=EventSettings(), health_step_s=0.01)
MARK = {"cache_control": {"type": "ephemeral"}}
OTHER = "Now something else entirely, so that no prompt of one conversation begins like one of another."


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines by endpoint id, and the proxy before them."""

    apps: dict[str, SglangApp]
    proxy: RunningProxy

    @property
    def kv(self) -> KvCache:
        kvcache = self.proxy.proxy.kvcache
        assert kvcache is not None
        return kvcache

    @property
    def exact(self) -> set[EndpointId]:
        return set(self.kv.overlap.indexes["default"].exact)

    async def turn(self, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
        """One turn of a chat, to which its answer is added: where it went, and its usage."""
        body = {"model": "sim", "messages": messages, "max_tokens": 20, **fields}
        answer = await self.proxy.client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        text = answer.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then? " * 20}]
        return answer.headers["x-kvproxy-endpoint"], answer.json()["usage"]


@contextlib.asynccontextmanager
async def fleet(engine: SglangSettings = QUICK, *, count: int = 2, **config: Any) -> AsyncIterator[Fleet]:
    """`kv_aware` over engines of this kind, with KV events followed and metrics read when a test says so."""
    settings = {"kv_events": True, "engine_metrics_interval": 0, **config.pop("kvcache", {})}
    config = {"filters": ["request_id", "inference_request", {"kvcache": settings}, "router"], **config}
    async with contextlib.AsyncExitStack() as stack:
        apps, urls = {}, {}
        for name in "abc"[:count]:
            apps[name] = SglangApp(engine, rng=random.Random(1))
            await stack.enter_async_context(apps[name])
            urls[name] = await stack.enter_async_context(serve(apps[name]))
        proxy = await stack.enter_async_context(running_proxy(urls, policy="kv_aware", **config))
        yield Fleet(apps, proxy)


def opening(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{text} " * 60}]


@pytest.mark.parametrize("form", list(EventForm))
@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
@pytest.mark.parametrize("described", [True, False])
async def test_its_kv_events_are_followed_without_a_setting(
    form: EventForm, algorithm: str | None, described: bool
) -> None:
    """Found in its server info, by a descriptor or by its arguments; maps and arrays; pages of tokens or of pairs. The
    prediction is what the engine reuses, to a page."""
    events = EventSettings(form=form, described=described)
    engine = replace(QUICK, kv_events=events, speculative_algorithm=algorithm, old_names=not described)
    async with fleet(engine) as place:
        await until(lambda: place.exact == {"a", "b"})
        first, second = opening("tell me of the sea"), opening(OTHER)
        homes = [(await place.turn(one))[0] for one in (first, second)]
        index = place.kv.overlap.indexes["default"]
        for _ in range(3):
            for chat, home in zip((first, second), homes, strict=True):
                await until(lambda home=home: index.precise.count_rows(EndpointId(home)))  # type: ignore[misc]
                where, usage = await place.turn(chat)
                assert where == home
                assert usage["prompt_tokens_details"]["cached_tokens"] > 0.6 * usage["prompt_tokens"]
        predicted = place.proxy.metric(
            "kvproxy_kvcache_predicted_tokens_total", cluster="default", endpoint=homes[0], source="precise"
        )
        reused = place.proxy.metric(
            "kvproxy_kvcache_reused_tokens_total", cluster="default", endpoint=homes[0], source="precise"
        )
        assert predicted > 500
        assert reused > predicted - 3 * 16 * 2
        assert not index.missed.doubted
        assert (index.followed.paired == set(homes)) is (algorithm is not None)


def pictured(text: str, seed: int) -> list[dict[str, Any]]:
    """Return a chat of text with a screenshot behind it, of 16 x 12 patches."""
    content = [
        {"type": "text", "text": f"{text} " * 60},
        picture_part(png(448, 336, seed=seed, size_bytes=200_000)),
        {"type": "text", "text": "What is this? " * 20},
    ]
    return [{"role": "user", "content": content}]


async def test_chats_with_pictures_go_where_their_pictures_are() -> None:
    """Its events name a picture by ids of 62 bits and are followed all the same; a chat that has another picture
    behind equal text reuses that text alone, as predicted."""
    async with fleet() as place:
        await until(lambda: place.exact == {"a", "b"})
        chats = [pictured(text, seed) for seed, text in enumerate(("tell me of the sea", OTHER))]
        homes = [(await place.turn(chat))[0] for chat in chats]
        index = place.kv.overlap.indexes["default"]
        for _ in range(3):
            for chat, home in zip(chats, homes, strict=True):
                await until(lambda home=home: index.precise.count_rows(EndpointId(home)))  # type: ignore[misc]
                where, usage = await place.turn(chat)
                assert where == home
                assert usage["prompt_tokens_details"]["cached_tokens"] > 0.7 * usage["prompt_tokens"]
        predicted, reused = (
            sum(
                place.proxy.metric(
                    f"kvproxy_kvcache_{name}_tokens_total", cluster="default", endpoint=one, source=source
                )
                for one in "ab"
                for source in ("precise", "approximate")
            )
            for name in ("predicted", "reused")
        )
        assert predicted == pytest.approx(reused, rel=0.2)
        other = pictured("tell me of the sea", 9)
        where, usage = await place.turn(other)
        again = (await place.turn(other))[0]
        assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] - 16 * 12
        assert again == where
        assert place.exact == {"a", "b"}
        assert not index.missed.doubted


async def test_events_that_were_lost_are_replayed() -> None:
    """Its replays name no topic."""
    async with fleet(count=1) as place:
        await until(lambda: place.exact == {"a"})
        chat = opening("tell me of the sea")
        publisher = place.apps["a"].publisher
        assert publisher is not None
        publisher.lose_next = 1
        await place.turn(chat)
        await place.turn(chat)
        filled = {"endpoint": "a", "outcome": "filled"}
        await until(lambda: place.proxy.metric("kvproxy_kv_event_gaps_total", **filled) == 1)
        assert place.exact == {"a"}


async def test_engine_metrics_reach_ledger_index_and_page() -> None:
    """Capacity by tokens, load, hit ratio, and which program it is."""
    async with fleet(count=1, kvcache={"kv_events": False}) as place:
        chat = opening("tell me of the sea")
        await place.kv.scraper.scrape_all()
        for _ in range(4):
            await place.turn(chat)
        await place.kv.scraper.scrape_all()
        index = place.kv.overlap.indexes["default"]
        assert index.capacities.reported_blocks(EndpointId("a")) > 0
        [endpoint] = place.proxy.proxy.clusters["default"].endpoints
        reading = place.kv.scraper.signals.latest_scrape(endpoint)
        assert reading is not None
        metrics = reading[1]
        assert (metrics.kind, metrics.running, metrics.waiting, metrics.kv_usage) == (EngineKind.SGLANG, 0, 0, 0.0)
        assert metrics.cache is not None
        assert (metrics.cache.capacity_tokens, metrics.cache.block_tokens) == (8192, 16)
        assert metrics.prefix_hits_tokens is not None
        assert metrics.prefix_queries_tokens is not None
        assert 0 < metrics.prefix_hits_tokens < metrics.prefix_queries_tokens


async def test_speeds_are_learned_from_whole_answers() -> None:
    """By its histogram of prefill times and the tokens it says it computed, other clients' requests included."""
    engine = replace(QUICK, engine=replace(FAST, timing=EngineTiming(time_scale=0.2)))
    async with fleet(engine, count=1) as place:
        speeds = place.proxy.proxy.clusters["default"].speeds
        assert speeds is not None
        await place.kv.scraper.scrape_all()
        for number in range(6):
            await place.turn(opening(f"{number} tell me of the sea"))
            await place.kv.scraper.scrape_all()
        assert speeds.estimates(asyncio.get_running_loop().time()).samples_by_kind["scraped"] > 0


async def test_a_flushed_cache_is_noticed() -> None:
    """By its events, at once: what was there counts no longer, and requests after it say why nothing was reused."""
    async with fleet(count=1) as place:
        await until(lambda: place.exact == {"a"})
        chat = opening("tell me of the sea")
        await place.turn(chat)
        index = place.kv.overlap.indexes["default"]
        await until(lambda: index.precise.count_rows(EndpointId("a")))
        answer = await place.proxy.client.post("/flush_cache")
        assert answer.status_code in (403, 404)  # no client's business
        assert place.apps["a"].ranks[0].reset_prefix_cache()
        await place.turn(opening(OTHER))
        await until(lambda: place.kv.state.losses.latest_loss("default", EndpointId("a")))
        loss = place.kv.state.losses.latest_loss("default", EndpointId("a"))
        assert loss is not None
        assert loss.reason.value == "cleared"
        assert (
            place.proxy.metric("kvproxy_engine_cache_losses_total", cluster="default", endpoint="a", reason="cleared")
            == 1
        )


async def test_flat_errors_pass_and_priorities_are_told_highest_first() -> None:
    """Its sign; what it refuses is refused with its own words."""
    priority = {"engine_priority": "on", "engine_priority_order": "highest_first"}
    small = replace(QUICK, enable_priority_scheduling=True, context_length=2048)
    async with fleet(small, count=1, **priority) as place:
        await place.turn(opening("tell me of the sea"))
        told = place.apps["a"].requests[-1]["priority"]
        assert told is not None
        assert told < 0
        body = {"model": "sim", "messages": opening("word " * 4000), "max_tokens": 2}
        refused = await place.proxy.client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["object"] == "error"


@pytest.mark.parametrize(
    ("path", "timeout", "well"), [("/health", 0.1, False), ("/health", 3.0, True), ("/ready", 0.3, True)]
)
async def test_probes_of_a_health_path_that_generates(path: str, timeout: float, well: bool) -> None:
    """It answers after a whole step; `/ready` at once."""
    health = {"active": True, "path": path, "timeout": timeout, "interval": 0.2}
    engine = replace(QUICK, health_step_s=0.5 if not well else 0.3)
    async with fleet(engine, count=1, health=health) as place:
        [endpoint] = place.proxy.proxy.clusters["default"].endpoints
        await until(lambda: endpoint.metrics.last_probe not in ("", "stalled"))  # on a busy machine
        assert (endpoint.condition(asyncio.get_running_loop().time()) is not Condition.UNHEALTHY) is well


async def test_an_engine_that_cannot_tokenize_chats_is_judged_by_what_was_routed() -> None:
    """Older releases refuse them: asked once, nothing is matched wrongly, and requests go back to where they were."""
    async with fleet(replace(QUICK, tokenizes_chats=False)) as place:
        await until(lambda: place.exact == {"a", "b"})
        chat = opening("tell me of the sea")
        homes = {(await place.turn(chat))[0] for _ in range(4)}
        assert len(homes) == 1
        assert {app.calls["POST /tokenize"] for app in place.apps.values()} <= {0, 1}


async def test_the_page_s_configuration() -> None:
    """docs/engines.md as a reader pastes it, with these engines' addresses: exact indexes, and turns that find the
    last one's pages."""
    given = yaml.safe_load(block("docs/engines.md", "engine_priority_order"))
    kvcache = given["filters"]["kvcache"]
    config = {key: given[key] for key in ("engine_priority_order", "health")}
    assert given.keys() == {*config, "policy", "endpoints", "filters"}
    async with fleet(kvcache=kvcache, count=len(given["endpoints"]), **config) as place:
        await until(lambda: place.exact == set(given["endpoints"]))
        chat = opening("tell me of the sea")
        home, _ = await place.turn(chat)
        await until(lambda: place.kv.overlap.indexes["default"].precise.count_rows(EndpointId(home)))
        where, usage = await place.turn(chat)
        assert where == home
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.6 * usage["prompt_tokens"]
        assert not any(app.calls["GET /health"] for app in place.apps.values())


@pytest.mark.parametrize("form", list(EventForm))
async def test_its_data_parallel_ranks_are_endpoints(form: EventForm) -> None:
    """Found out by its metrics and its arguments: each has its own events and its own load, and a conversation stays
    with the rank that holds it, whatever the server's own balancing would do."""
    async with fleet(replace(QUICK, dp_size=2, kv_events=EventSettings(form=form)), count=1) as place:
        await place.kv.scraper.scrape_all()
        streams = place.kv.overlap.reports
        assert isinstance(streams, EventStreams)
        await streams.follow_endpoints()
        await until(lambda: place.exact == {"a@0", "a@1"})
        index = place.kv.overlap.indexes["default"]
        chats = [opening("tell me of the sea"), opening(OTHER)]
        cluster, homes = place.proxy.proxy.clusters["default"], ["a@0", "a@1"]
        for home, chat in zip(homes, chats, strict=True):  # the first turn where it is to be, the next by what is held
            cluster.operator.drain_endpoint(EndpointId("a@1" if home == "a@0" else "a@0"))
            assert (await place.turn(chat))[0] == home
            cluster.operator.drain_endpoint(EndpointId("a@1" if home == "a@0" else "a@0"), draining=False)
        for _ in range(3):
            for chat, home in zip(chats, homes, strict=True):
                await until(lambda home=home: index.precise.count_rows(EndpointId(home)))  # type: ignore[misc]
                where, usage = await place.turn(chat)
                assert where == home
                assert usage["prompt_tokens_details"]["cached_tokens"] > 0.6 * usage["prompt_tokens"]
        served = [f"a@{request['rank']}" for request in place.apps["a"].requests]
        assert served == homes * 4
        await place.kv.scraper.scrape_all()
        for endpoint in place.proxy.proxy.clusters["default"].endpoints:
            reading = place.kv.scraper.signals.latest_scrape(endpoint)
            assert reading is not None
            assert reading[1].cache is not None
            assert reading[1].cache.capacity_tokens == 8192


async def test_a_rank_that_is_gone_costs_one_further_question() -> None:
    """It refuses in words of its own, in a chat's shape and in that of Messages."""
    for path, body in (
        ("/v1/chat/completions", {"messages": opening("hello")}),
        ("/v1/messages", {"messages": opening("hello")}),
    ):
        endpoints = {"data_parallel": {"ranks": [0, 1, 2]}}
        app = SglangApp(replace(QUICK, dp_size=2), rng=random.Random(1))
        async with app, serve(app) as url, running_proxy([{"id": "a", "url": url, **endpoints}]) as proxy:
            for _ in range(3):
                answer = await proxy.client.post(path, json={"model": "sim", "max_tokens": 1, **body})
                assert answer.status_code == 200
            assert [str(one.id) for one in proxy.proxy.clusters["default"].endpoints] == ["a@0", "a@1"]


async def test_an_agents_messages_are_known_by_their_tokens() -> None:
    """Tools, results and marks: what its events say of the last turn is what the engine reuses of it."""
    tool = {"name": "look_up", "description": "Looks a word up. " * 20, "input_schema": {"type": "object"}}
    system = [{"type": "text", "text": "You help. " * 60}, {"type": "text", "text": "Be brief.", **MARK}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": OTHER * 4, **MARK}]}]
    async with fleet(count=1) as place:

        def told(outcome: str) -> float:
            return place.proxy.metric("kvproxy_kvcache_tokenizes_total", outcome=outcome)

        await until(lambda: place.exact == {"a"})
        index, before = place.kv.overlap.indexes["default"], 0
        for turn in range(4):
            body = {"model": "sim", "max_tokens": 4, "system": system, "tools": [tool], "messages": messages}
            answer = await place.proxy.client.post("/v1/messages", json=body, headers={"x-kvproxy-debug": "1"})
            usage = answer.json()["usage"]
            read = usage.get("cache_read_input_tokens", 0)
            if turn:
                matched = re.search(r"matched=a:(\d+)/precise", answer.headers["x-kvproxy-decision"])
                assert matched is not None, answer.headers["x-kvproxy-decision"]
                assert before - 2 * 16 < int(matched[1]) <= read <= before + 16
            before = usage["input_tokens"] + read
            call = {"type": "tool_use", "id": f"t{turn}", "name": "look_up", "input": {"word": str(turn)}}
            result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": f"{turn} is a number. " * 30}
            messages.append({"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]})
            messages.append({"role": "user", "content": [result, {"type": "text", "text": "And?", **MARK}]})
            await until(lambda turn=turn: told("ok") == turn + 1)  # type: ignore[misc]
            await until(lambda held=before: index.precise.count_rows(EndpointId("a")) * 16 > held - 32)  # type: ignore[misc]
