"""Streams as operators see them."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.cache.overlap.reports import EngineReports
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.kv_events.feature import FEATURE
from kvproxy.features.kv_events.status import StreamReason, StreamState, StreamStatus
from kvproxy.features.kv_events.streams import EventStreams
from tests.operate.admin.test_troubles import Place
from tests.support.clock import FakeClock


class Streams(EventStreams):
    """KV event streams of every endpoint, in one state; those named publish."""

    def __init__(self, status: StreamStatus, *publishing: str) -> None:
        self.status = status
        self.publishing = publishing

    def streams(self, endpoint: Endpoint) -> dict[int, StreamStatus]:
        return {0: self.status}

    def publishes(self, endpoint: Endpoint) -> bool:
        return endpoint.id in self.publishing


async def test_event_streams_that_are_down(clock: FakeClock) -> None:
    """Once they have been for a while, before failing requests; not of an engine that is down itself."""
    place = Place(clock)
    assert place.proxy.kvcache is not None
    overlap: Any = place.proxy.kvcache.overlap
    overlap.reports = Streams(StreamStatus(StreamState.DEGRADED, StreamReason.DISCONNECTED))
    try:
        place.probe_fails("a")
        await place.answer(9, status=500)
        clock.advance(5.0)
        await place.answer(0)
        assert [one["where"] for one in (await place.live())["findings"]] == ["default/a", "default"]
        clock.advance(5.0)
        await place.answer(0)
        findings = (await place.live())["findings"]
        assert [one["where"] for one in findings] == ["default/a", "default/b", "default/c", "default"]
        assert findings[1]["severity"] == "warning"
        assert findings[1]["what"].startswith("KV events: disconnected")
        overlap.reports.status = StreamStatus(StreamState.EXACT, StreamReason.FOLLOWING)
        await place.answer(0)
        clock.advance(1.0)
        assert len((await place.live())["findings"]) == 2
    finally:
        overlap.reports = EngineReports({})


def kvcache(**settings: Any) -> dict[str, Any]:
    return {"filters": ["inference_request", {"kvcache": settings}, "router"]}


@pytest.mark.parametrize(
    ("config", "publishing", "state", "reason"),
    [
        ({}, None, "on", "auto: of engines that publish"),
        ({}, ["a", "b"], "on", "auto: 2 of 3 endpoints publish"),
        ({}, [], "off", "auto: 0 of 3 endpoints publish"),
        ({"policy": "random"}, ["a"], "off", "auto: no policy weighs cached prefixes"),
        ({"policy": "random", "shadow_policy": "kv_aware"}, None, "on", "auto: of engines that publish"),
        (kvcache(kv_events=False), ["a"], "off", "`kv_events: false`"),
        (kvcache(kv_events=True), None, "on", "required of every engine"),
        (kvcache(enabled=False), None, "off", "the kvcache filter is not in use"),
    ],
)
def test_they_are_on_or_off_for_a_reason(
    clock: FakeClock, config: dict[str, Any], publishing: list[str] | None, state: str, reason: str
) -> None:
    """By the file alone, and by what a running proxy has found out."""
    place = Place(clock, **{"policy": "kv_aware", **config})
    if publishing is not None and place.proxy.kvcache is not None:
        streams = Streams(StreamStatus(StreamState.EXACT, StreamReason.FOLLOWING), *publishing)
        place.proxy.kvcache.overlap.reports = streams
    (row,) = FEATURE.list_capabilities(place.proxy.config, None if publishing is None else place.proxy)
    assert (row.state, row.reason) == (state, reason)
