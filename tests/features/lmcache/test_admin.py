"""Pins as the admin listener shows them."""

from __future__ import annotations

from collections import deque

import pytest

from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.store import Action, ActionKind
from kvproxy.features.lmcache.observer import LMCacheObserver
from tests.operate.admin.test_cache import admin_of, proxy_of

PINNING = [
    "inference_request",
    {"kvcache": {"lmcache_endpoint": "http://127.0.0.1:9", "cache_strategy": {"enable_pinning": True}}},
    "router",
]


@pytest.mark.parametrize(("counted", "left_s"), [(False, 200.0), (True, None)])
async def test_pins_with_the_time_they_have_left(
    counted: bool, left_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the service keeps pins until they are taken back, no time is left to show."""
    proxy = proxy_of(filters=PINNING)
    assert proxy.kvcache is not None
    observer = proxy.kvcache.observers.find(LMCacheObserver)
    assert observer is not None
    strategies = observer.store.strategies
    assert strategies is not None
    monkeypatch.setattr(strategies.pin, "_supports", lambda: {ActionKind.UNPIN} if counted else set())
    prefix = KnownPrefix(0xABC, "m", "", deque(), whole=0xABC)
    proxy.kvcache.overlap.store.adopt_action(Action(ActionKind.PIN, "i1", prefix, "hot"), proxy.clock() - 100.0)
    async with admin_of(proxy) as client:
        [lease] = (await client.get("/cache/leases")).json()["leases"]
        live = (await client.get("/live")).json()
    assert (lease["instance"], lease["prefix"], lease["age_s"]) == ("i1", f"{0xABC:016x}", 100.0)
    assert lease["lapses_in_s"] == left_s
    assert live["cache"]["leases"] == 1
