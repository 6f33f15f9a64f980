"""Ranks of one engine, each with a stream of its own."""

from __future__ import annotations

from dataclasses import replace

import httpx

from kvproxy.cluster.settings import DataParallelSettings
from kvproxy.features.kv_events.status import StreamState
from kvproxy.features.kv_events.streams import EventStreams
from tests.cache.support import cluster_of, running, settings
from tests.cache.test_ranks import A0, A1, EVENTS, prefill, ranked
from tests.lab.simulator.support import TINY
from tests.support.clock import FakeClock
from tests.support.loopback import serve
from tests.support.until import until
from tests.support.vllms.ranks import RankedSettings, RankedVllm


async def test_every_rank_is_followed_by_its_own_events() -> None:
    """Blocks that one stored are missing at the other."""
    async with ranked(kv_events=True) as (service, _, client):
        await service.kv.scraper.scrape_all()
        streams = service.kv.overlap.reports
        assert isinstance(streams, EventStreams)
        await streams.follow_endpoints()
        exact = service.kv.overlap.indexes["default"].exact
        await until(lambda: set(exact) == {A0, A1})
        first, second = service.cluster.endpoints
        assert set(streams.streams(first)) == {0}
        assert set(streams.streams(second)) == {1}
        assert streams.streams(second)[1].state is StreamState.EXACT
        await prefill(client, 1)
        precise = service.kv.overlap.indexes["default"].precise
        await until(lambda: precise.count_rows(A1) > 10)
        assert precise.count_rows(A0) == 0


async def test_a_rank_without_requests_is_not_silent(clock: FakeClock) -> None:
    """Behind one endpoint the engine chooses among its ranks, so that nothing proves which one should publish."""
    engine = RankedVllm(RankedSettings(replace(TINY, kv_events=EVENTS)))
    async with engine, serve(engine) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        cluster = cluster_of({"a": url}, clock=clock, data_parallel=DataParallelSettings(steer=False))
        async with running(settings(kv_events=True), cluster, clock=clock) as service:
            streams = service.kv.overlap.reports
            assert isinstance(streams, EventStreams)
            (endpoint,) = cluster.endpoints
            exact = service.kv.overlap.indexes["default"].exact
            await until(lambda: set(exact) == {endpoint.id})
            await prefill(client, 1)
            for _ in range(2):
                streams.note_traffic(endpoint, 600)
                clock.advance(31.0)
            assert set(exact) == {endpoint.id}
