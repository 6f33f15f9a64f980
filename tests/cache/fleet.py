"""Simulated engines and LMCache on loopback."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.proxy.listener.server import serve
from tests.lab.simulator.support import TINY
from tests.support.vllms import KINDS

NAMES = ("a", "b")


@dataclass(frozen=True)
class Place:
    """Where everything listens."""

    fleet: Fleet
    engines: dict[str, str]
    lmcache: str

    @property
    def calls(self) -> Any:
        """Requests to the LMCache service, by method and route."""
        app = self.fleet.controller or self.fleet.coordinator
        assert app is not None
        return app.calls


@contextlib.asynccontextmanager
async def simulated(
    *,
    names: tuple[str, ...] = NAMES,
    template: VllmSettings = TINY,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Place]:
    """Engines of these names with an LMCache controller (or what `settings` of the fleet say)."""
    equal = dict.fromkeys(names, replace(template, **(engine or {})))
    fleet = Fleet(FleetSettings(equal, **settings), rng=random.Random(1), kinds=KINDS)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(fleet)

        async def served(app: Any) -> str:
            return await stack.enter_async_context(serve(app, drain_s=0.01, cut_grace_s=0.01))

        engines = {name: await served(app) for name, app in fleet.engines.items()}
        lmcache = await served(fleet.controller or fleet.coordinator)
        yield Place(fleet, engines, lmcache)
