"""A simulated fleet on loopback: what demo, `kvproxy simulate` and `kvproxy.testing` start."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from random import Random

from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.proxy.listener.server import serve


@dataclass(frozen=True, slots=True)
class ServedFleet:
    """Where everything listens: engines by name, and LMCache ("": there is none)."""

    engines: dict[str, str]
    lmcache: str = ""


@contextlib.asynccontextmanager
async def serve_fleet(
    settings: FleetSettings, *, rng: Random, ports: Mapping[str, int] | None = None, lmcache_port: int = 0
) -> AsyncIterator[ServedFleet]:
    """Run it on 127.0.0.1, on free ports but for `ports` of engines by name. OSError for a port that is taken."""
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(settings, rng=rng))
        urls = {
            name: await stack.enter_async_context(serve(app, port=(ports or {}).get(name, 0), drain_s=1.0))
            for name, app in fleet.engines.items()
        }
        lmcache = fleet.coordinator or fleet.controller
        if lmcache is None:
            yield ServedFleet(urls)
            return
        yield ServedFleet(urls, await stack.enter_async_context(serve(lmcache, port=lmcache_port, drain_s=1.0)))
