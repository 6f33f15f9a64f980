"""Strategies of a cache service, over fake engines and a fake LMCache."""

from __future__ import annotations

import sys

import pytest

from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.features.lmcache.feature import FEATURE
from kvproxy.features.lmcache.strategies import RecordState
from kvproxy.proxy.filters.kvcache import needs_facts
from tests.cache.support import NOWHERE, A, chat, controller, settings, world
from tests.cache.support import engine as answering
from tests.cache.test_watch import TURN, round_of
from tests.support.clock import FakeClock


async def test_leases_are_renewed_between_requests(clock: FakeClock) -> None:
    """The round ticks the strategies."""
    strategy = {"enable_pinning": True, "hot_content_threshold": 1, "pin_lease": 300}
    lmcache = controller(lambda _: {})
    async with world({"a": answering()}, lmcache, clock=clock, cache_strategy=strategy) as service:
        await round_of(service)  # nothing is pinned yet
        await service.serve(chat(TURN), A)
        await service.settled()
        assert lmcache.calls["/pin"] == 1
        clock.advance(250)
        await round_of(service)
        await service.settled()
        assert lmcache.calls["/pin"] == 2


def test_without_a_service_the_page_loads_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import takes the event loop tens of milliseconds."""
    module = "kvproxy.features.lmcache.observer"
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert FEATURE.describe_cache(None, "status", 0.0) == {"lookups": {}, "actions": {}, "switched_off": []}
    assert FEATURE.describe_cache(None, "pins", 0.0) == {}
    assert module not in sys.modules


def test_lookups_need_facts_under_any_policy() -> None:
    """Also one that weighs no prefixes."""
    cluster = ClusterSettings(policy=PolicyName.ROUND_ROBIN)
    assert needs_facts(settings(lmcache_endpoint=NOWHERE), cluster)
    assert not needs_facts(settings(), cluster)


@pytest.mark.parametrize(("other", "kept"), [("http://127.0.0.1:1", True), ("http://127.0.0.1:2", False)])
def test_pins_are_kept_while_the_lmcache_is_the_same(other: str, kept: bool) -> None:
    """Pins and compressed prefixes: forgotten, they would never be undone."""
    state = RecordState()
    record = state.record_at("http://127.0.0.1:1")
    assert (state.record_at(other) is record) is kept
