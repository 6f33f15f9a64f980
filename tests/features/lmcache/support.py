"""Known prefixes and pressures for the strategies."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator
from typing import Any

from kvproxy.cache.actions.hotness import Hotness
from kvproxy.features.lmcache.pressure import Pressure
from kvproxy.features.lmcache.settings import StrategySettings
from kvproxy.features.lmcache.strategies import PressureOf, Served
from tests.cache.fleet import Place
from tests.cache.support import count_uses
from tests.support.proxy import RunningProxy, running_proxy

CALM = Pressure(0.0, 0.0)
BUSY = Pressure(1.0, 1.0)
UNKNOWN = Pressure()


def hotness() -> Hotness:
    return Hotness(window_s=300, max_records=100, max_keys=1000)


def strategy(**changes: Any) -> StrategySettings:
    """Hot from the second use on."""
    return StrategySettings.model_validate({"hot_content_threshold": 2, **changes})


def everywhere(pressure: Pressure) -> PressureOf:
    return lambda _: pressure


def serve(
    known: Hotness, *keys: int, now: float = 0.0, instance: str = "a", of: array[int] | None = None, times: int = 1
) -> Served:
    """Serve a prompt with these message prefixes; its tokens begin with its first key unless given."""
    return Served(instance, count_uses(known, *keys, now=now, instance=instance, of=of, times=times))


@contextlib.asynccontextmanager
async def proxied(place: Place, **kvcache: Any) -> AsyncIterator[RunningProxy]:
    """Yield a round-robin proxy whose kvcache filter has these settings."""
    chosen = {
        "lmcache_endpoint": place.lmcache,
        "lookup_routing_timeout": "60s",
        "engine_metrics_interval": 0,
        **kvcache,
    }
    filters = ["inference_request", {"kvcache": chosen}, "router"]
    async with running_proxy(place.engines, filters=filters) as proxy:
        yield proxy
