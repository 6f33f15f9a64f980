"""Data-parallel ranks that are found out, and what is known of each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.settings import DataParallelSettings, EndpointSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.operate.admin.cache_status import engine_status
from tests.cache.support import Fake, Service, chat, cluster_of, long_text, running, settings, world
from tests.lab.simulator.support import TINY
from tests.support.loopback import serve
from tests.support.vllms.ranks import RankedSettings, RankedVllm

EVENTS = PublisherSettings()
A0, A1 = EndpointId("a@0"), EndpointId("a@1")


@contextlib.asynccontextmanager
async def ranked(
    *, first: int = 0, events: PublisherSettings | None = EVENTS, **config: Any
) -> AsyncIterator[tuple[Service, RankedVllm, httpx.AsyncClient]]:
    """Yield a service in front of a simulated engine with two ranks, and a client of the engine."""
    engine = RankedVllm(RankedSettings(replace(TINY, kv_events=events), first=first))
    async with (
        engine,
        serve(engine) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
        running(settings(**config), cluster_of({"a": url})) as service,
    ):
        yield service, engine, client


def names(service: Service) -> list[str]:
    return [str(endpoint.id) for endpoint in service.cluster.endpoints]


async def prefill(client: httpx.AsyncClient, rank: int, text: str = "w " * 600) -> None:
    body = {"model": "tiny", "prompt": text, "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body, headers={"x-data-parallel-rank": str(rank)})
    answer.raise_for_status()


async def test_ranks_are_found_by_metrics_and_event_sources() -> None:
    """By the numbers of the deployment; then each has its own readings."""
    async with ranked(first=4) as (service, _, client):
        await service.kv.scraper.scrape_all()
        assert names(service) == ["a@4", "a@5"]
        await prefill(client, 0)
        await service.kv.scraper.scrape_all()
        readings = [service.kv.scraper.signals.latest_scrape(endpoint) for endpoint in service.cluster.endpoints]
        queried = [reading[1].prefix_queries_tokens for reading in readings if reading is not None]
        assert queried[1:] == [0]
        assert queried[0] is not None
        assert queried[0] > 500
        cache = [engine_status(service.kv, endpoint) for endpoint in service.cluster.endpoints]
        assert all(one is not None for one in cache)
        capacities = [
            service.kv.overlap.indexes["default"].approximate.counts.capacity(EndpointId(n)) for n in names(service)
        ]
        assert capacities[0] == capacities[1]
        before = service.cluster.endpoints
        await service.kv.scraper.scrape_all()
        assert service.cluster.endpoints == before


async def test_without_event_sources_the_engine_stays_one_candidate(caplog: pytest.LogCaptureFixture) -> None:
    """Metrics alone do not say that requests may ask for a rank; the operator is told once."""
    async with ranked(events=None) as (service, _, _client):
        with caplog.at_level(logging.WARNING):
            await service.kv.scraper.scrape_all()
            await service.kv.scraper.scrape_all()
        assert names(service) == ["a"]
        assert service.cluster.engines[0].ranks.unknown
        assert caplog.text.count("has the data-parallel ranks 0, 1 by its metrics") == 1


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_configured_event_sources_count_for_engines_without_a_report(size: int) -> None:
    """Where it agrees with the metrics."""
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 0\n' % rank for rank in (0, 1))
    stated = {"endpoint": "tcp://*:5557", "data_parallel_size": size}
    async with world({"a": Fake({"/metrics": lambda _: page})}, kv_event_sources=stated) as service:
        await service.kv.scraper.scrape_all()
        assert names(service) == (["a@0", "a@1"] if size == 2 else ["a"])


async def test_an_engine_that_does_not_answer_is_asked_again() -> None:
    """Its next answer counts."""
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 0\n' % rank for rank in (0, 1))
    source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    answers: list[Any] = [(500, {"error": "no"}), {"0": source, "1": source}]
    engine = Fake({"/metrics": lambda _: page, "/kv_event_sources": lambda _: answers.pop(0)})
    async with world({"a": engine}, features=()) as service:
        await service.kv.scraper.scrape_all()
        assert names(service) == ["a"]
        await service.kv.scraper.scrape_all()
        assert names(service) == ["a@0", "a@1"]
        await service.kv.scraper.scrape_all()
    assert engine.calls["/kv_event_sources"] == 2


async def test_sglang_says_how_many_it_was_started_with() -> None:
    """Whether it publishes events or not."""
    page = b"".join(b'sglang:num_running_reqs{dp_rank="%d",tp_rank="0"} 0\n' % rank for rank in (0, 1))
    engine = Fake({"/metrics": lambda _: page, "/server_info": lambda _: {"dp_size": 2, "page_size": 16}})
    async with world({"a": engine}, features=()) as service:
        await service.kv.scraper.scrape_all()
        assert names(service) == ["a@0", "a@1"]


@pytest.mark.parametrize("steer", [True, False])
async def test_configured_values_are_not_queried(steer: bool) -> None:
    """Neither ranks that are given, nor any where the engine is to balance by itself."""
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 3\n' % rank for rank in (0, 1))
    engine = Fake({"/metrics": lambda _: page})
    async with world({"a": engine}, features=()) as service:
        stated = DataParallelSettings(steer=steer, ranks=(0, 1, 2))
        url = str(service.cluster.endpoints[0].origin)
        service.cluster.apply_endpoints([EndpointSettings(id="a", url=url, data_parallel=stated)])
        await service.kv.scraper.scrape_all()
        assert names(service) == (["a@0", "a@1", "a@2"] if steer else ["a"])
        engines = [endpoint.load.engine for endpoint in service.cluster.endpoints]
        running_ = [None if one is None else one.running for one in engines]
        assert running_ == ([3, 3, None] if steer else [6])
        assert service.cluster.engines[0].ranks.shown == (0, 1)
    assert engine.calls["/kv_event_sources"] == 0


async def test_another_process_is_another_process_on_every_rank() -> None:
    """The blocks of all ranks are forgotten, and a rank it refused may be requested again."""
    async with ranked() as (service, engine, _):
        await service.kv.scraper.scrape_all()
        await service.kv.scraper.scrape_all()
        for name in (A0, A1):
            await service.serve(chat(long_text(str(name))), name)
        service.cluster.ranks.record_refusal(service.cluster.endpoints[1], 1)
        assert names(service) == ["a@0"]
        for app in engine.ranks.values():
            app.state.metrics.started_at += 100
        await service.kv.scraper.scrape_all()
        assert names(service) == ["a@0", "a@1"]
        assert (await service.ask(chat(long_text("a@0")))).preferred is None
