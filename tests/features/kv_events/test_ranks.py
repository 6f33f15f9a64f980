"""Ranks of one engine, each with a stream of its own."""

from __future__ import annotations

from kvproxy.features.kv_events.status import StreamState
from kvproxy.features.kv_events.streams import EventStreams
from tests.cache.test_ranks import A0, A1, prefill, ranked
from tests.support.until import until


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
