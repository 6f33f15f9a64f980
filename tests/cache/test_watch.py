"""Readings of engines and host, out of every request's path."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvproxy.cache.feature import CacheFeature, CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.routing.load import EngineState
from kvproxy.cluster.settings import EndpointSettings
from tests.cache.support import A, B, Fake, Service, chat, long_text, world
from tests.support.clock import FakeClock
from tests.support.until import until

TURN = long_text("w")


def exposition(*, tokens: int = 25_600, usage: float = 0.5, caching: bool = True) -> bytes:
    """Return an engine's /metrics."""
    blocks, ranks = tokens // 16, 'engine="0"'
    config = f'block_size="16",num_gpu_blocks="{blocks}",enable_prefix_caching="{caching}"'
    lines = (
        f"vllm:kv_cache_usage_perc{{{ranks}}} {usage}",
        f"vllm:num_requests_running{{{ranks}}} 64",
        f"vllm:cache_config_info{{{config}}} 1",
    )
    return "\n".join(lines).encode()


def engine(**figures: Any) -> Fake:
    return Fake({"/metrics": lambda _: exposition(**figures)})


async def round_of(service: Service) -> None:
    await service.kv.scraper.scrape_all()


async def test_an_index_is_as_large_as_its_engines_cache() -> None:
    """Half or unbounded capacity costs a policy more than it gains: 25 600 tokens are 400 blocks of 256 bytes."""
    async with world({"a": engine(tokens=25_600)}) as service:
        await round_of(service)
        assert service.kv.overlap.indexes["default"].approximate.counts.capacity(A) == 400


async def test_an_engine_without_prefix_caching_holds_nothing() -> None:
    """Nothing that was routed there is ever found again."""
    async with world({"a": engine(caching=False)}) as service:
        await round_of(service)
        await service.serve(chat(TURN), A)
        assert (await service.ask(chat(TURN))).preferred is None


async def test_the_ledger_hears_of_the_engines_memory() -> None:
    """With the time it was read. Of an engine that is not read nothing is known."""
    clock = FakeClock(70.0)
    async with world({"a": engine(tokens=12_800), "b": Fake({})}, clock=clock) as service:
        read, unread = service.cluster.endpoints
        await round_of(service)
        assert isinstance(read.load.engine, EngineState)
        assert (read.load.engine.read_at, read.load.engine.capacity_tokens) == (70.0, 12_800)
        assert unread.load.engine is None


async def test_engines_that_do_not_say_change_nothing() -> None:
    quiet = Fake({"/metrics": lambda _: b"# nothing of interest\n"})
    async with world({"a": Fake({}), "b": quiet}) as service:
        before = service.kv.overlap.indexes["default"].approximate.counts.capacity(A)
        await round_of(service)
        assert service.kv.overlap.indexes["default"].approximate.counts.capacity(A) == before


async def test_an_endpoint_that_left_or_moved_is_forgotten() -> None:
    """Another engine under the same id holds nothing of what the old one did."""
    async with world({"a": engine(), "b": engine()}) as service:
        await round_of(service)
        await service.serve(chat(TURN), A)
        assert (await service.ask(chat(TURN))).preferred == A
        moved = EndpointSettings(id="a", url="http://127.0.0.1:9")
        service.cluster.apply_endpoints([moved])
        await round_of(service)
        assert (await service.ask(chat(TURN))).preferred is None
        assert service.kv.overlap.indexes["default"].hot.endpoints == 1


class CountsUses(CacheFeature):
    """Needs no more than that."""

    name = "uses"

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        return CacheNeeds(uses=True)


async def test_an_instance_that_left_is_named_by_no_prefix(clock: FakeClock) -> None:
    """One under which another endpoint still stands is."""
    engines = {"a": engine(), "b": engine()}
    async with world(engines, clock=clock, instances={"b": "shared"}, features=[CountsUses()]) as service:
        await round_of(service)
        for where in (A, B):
            await service.serve(chat(TURN), where)
        (prefix,) = service.kv.actions.hotness.walk_latest(9)
        assert prefix.instances == {"a", "shared"}
        url = service.cluster.endpoints[1].origin
        stays = EndpointSettings(id="c", url=f"http://{url.host}:{url.port}", instance_id="shared")
        service.cluster.apply_endpoints([stays])
        await round_of(service)
        assert prefix.instances == {"shared"}


async def test_rounds_follow_each_other_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """And a broken one does not end them."""
    scraped = engine()
    async with world({"a": scraped}, engine_metrics_interval=0.005) as service:
        await until(lambda: scraped.calls["/metrics"] >= 3)
        assert {task.get_name() for task in asyncio.all_tasks()} >= {"kvcache watch"}
        service.kv.scraper._on_round = None  # type: ignore[assignment]
        with caplog.at_level(logging.ERROR):
            await until(lambda: "a round of readings is broken" in caplog.text)
        seen = scraped.calls["/metrics"]
        await until(lambda: scraped.calls["/metrics"] > seen)


async def test_without_reading_leases_and_endpoints_are_still_followed() -> None:
    """`engine_metrics_interval: 0` asks no engine for anything."""
    quiet = engine()
    async with world({"a": quiet}) as service:
        await service.serve(chat(TURN), A)
        await service.kv.scraper.scrape_all(reading=False)
        service.cluster.apply_endpoints([EndpointSettings(id="a", url="http://127.0.0.1:9")])
        await service.kv.scraper.scrape_all(reading=False)
        assert (await service.ask(chat(TURN))).preferred is None
    assert quiet.calls["/metrics"] == 0


@pytest.mark.parametrize(("counters", "held"), [((100, 200, 300), True), ((100, 200, 50), False)])
async def test_an_engine_whose_counters_begin_anew_holds_nothing(counters: tuple[int, ...], held: bool) -> None:
    """One that does not say when its process began."""
    values = iter(counters)

    def counting(_: dict[str, Any]) -> bytes:
        queries = next(values)
        return (
            exposition()
            + f"\nvllm:prefix_cache_queries_total{{}} {queries}\nvllm:prefix_cache_hits_total{{}} 0".encode()
        )

    async with world({"a": Fake({"/metrics": counting})}) as service:
        await round_of(service)
        await service.serve(chat(TURN), A)
        for _ in range(2):
            await round_of(service)
        index = service.kv.overlap.indexes["default"].approximate
        assert (index.counts.held_blocks(A) > 0) is held
        assert index.counts.capacity(A) == 400


async def test_a_reading_that_breaks_spares_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """An engine's answer may lead to unforeseen failures: they are logged, and the round is finished."""
    async with world({"a": engine(tokens=25_600), "b": engine(tokens=25_600)}) as service:
        first, _ = service.cluster.engines
        first.adapters = None  # type: ignore[assignment]
        await round_of(service)
        capacity = service.kv.overlap.indexes["default"].approximate.counts.capacity
        assert capacity(B) == 400 != capacity(A)
        assert service.kv.scraper.signals.latest_scrape(service.cluster.endpoints[1]) is not None
    broken = [record for record in caplog.records if "is broken" in record.message]
    assert [record.message for record in broken] == ["[kvcache] the reading of default/a is broken"]
    assert broken[0].exc_info is not None


async def test_an_engine_that_another_process_read_is_not_read_again(clock: FakeClock) -> None:
    """One reading an interval for all of them: whose round comes first reads and tells, the others learn as much."""
    asked = engine(tokens=25_600)
    async with world({"a": asked}, clock=clock) as one, world({"a": asked}, clock=clock) as other:
        one.kv.scraper.readings.tell, other.kv.scraper.readings.tell = other.kv.scraper.hear, one.kv.scraper.hear
        for _ in range(3):
            await round_of(one)
            await round_of(other)
            clock.advance(5.0)
        assert asked.calls["/metrics"] == 3
        assert other.kv.overlap.indexes["default"].approximate.counts.capacity(A) == 400
        clock.advance(5.0)
        await round_of(other)  # the first one says nothing any more
        assert asked.calls["/metrics"] == 4


async def test_readings_of_an_unknown_engine_are_left_out(clock: FakeClock) -> None:
    """Processes learn of new endpoints one after the other."""
    async with world({"a": engine()}, clock=clock) as one, world({"b": engine()}, clock=clock) as other:
        one.kv.scraper.readings.tell = other.kv.scraper.hear
        await round_of(one)
        assert other.kv.scraper.readings.take("default", "a") is None
