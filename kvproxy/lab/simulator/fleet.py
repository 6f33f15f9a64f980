"""Several simulated engines and their LMCache services, wired together; the caller serves the apps."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvproxy.base.types import Clock, utc_seconds
from kvproxy.lab.simulator.lmcache_chunks import WorkerSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerApp, ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorApp, CoordinatorSettings
from kvproxy.lab.simulator.sglang_server import SglangApp
from kvproxy.lab.simulator.sglang_settings import SglangSettings
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.lab.simulator.vllm_state import OnPrefilled, Prefilled

EngineKindSettings = VllmSettings | SglangSettings
EngineApp = VllmApp | SglangApp
_Settings = TypeVar("_Settings", VllmSettings, SglangSettings)

#: Apps of engines by the type of their settings.
KINDS: Mapping[type, Callable[..., EngineApp]] = {VllmSettings: VllmApp, SglangSettings: SglangApp}


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """`engines` by LMCache instance id, which is their endpoint id too; `host_chunks` of host memory each (vLLM's
    alone report what they compute)."""

    engines: Mapping[str, EngineKindSettings] = field(default_factory=dict)
    controller: ControllerSettings | None = field(default_factory=ControllerSettings)
    coordinator: CoordinatorSettings | None = None
    host_chunks: int = 4096


def clone_engines(template: _Settings, count: int) -> dict[str, _Settings]:
    """`count` equal engines: sim-0, sim-1 ..."""
    return {f"sim-{number}": template for number in range(count)}


class Fleet:
    """An async context manager around the engines. `engines`, `controller` and `coordinator` are ASGI apps; `kinds` has
    those of engines by the type of their settings."""

    def __init__(
        self,
        settings: FleetSettings,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = utc_seconds,
        rng: random.Random | None = None,
        kinds: Mapping[type, Callable[..., EngineApp]] = KINDS,
    ) -> None:
        source = rng or random.Random()
        self.controller = self._build_controller(settings, clock, source)
        self.coordinator = self._build_coordinator(settings, clock, source)
        self.engines: dict[str, EngineApp] = {
            name: kinds[type(engine)](
                engine, clock=clock, wall_clock=wall_clock, rng=source, on_prefilled=self._offload(name)
            )
            for name, engine in settings.engines.items()
        }
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Fleet:
        for engine in self.engines.values():
            await self._stack.enter_async_context(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _build_controller(self, settings: FleetSettings, clock: Clock, rng: random.Random) -> ControllerApp | None:
        if settings.controller is None:
            return None
        named = {worker.instance_id for worker in settings.controller.workers}
        missing = [
            WorkerSettings(name, capacity_chunks=settings.host_chunks) for name in settings.engines if name not in named
        ]
        workers = (*settings.controller.workers, *missing)
        return ControllerApp(replace(settings.controller, workers=workers), clock=clock, rng=rng)

    def _build_coordinator(self, settings: FleetSettings, clock: Clock, rng: random.Random) -> CoordinatorApp | None:
        if settings.coordinator is None:
            return None
        names = dict.fromkeys((*settings.coordinator.instances, *settings.engines))
        return CoordinatorApp(replace(settings.coordinator, instances=tuple(names)), clock=clock, rng=rng)

    def _offload(self, name: str) -> OnPrefilled:
        """Keep a computed prompt in host memory and reports it to both services, as a connector does."""

        def offload(prompt: Prefilled) -> None:
            if self.controller is not None:
                self.controller.workers[name].admit(prompt.token_ids)
            if self.coordinator is not None:
                self.coordinator.admit(name, prompt.token_ids, model_name=prompt.model, cache_salt=prompt.cache_salt)

        return offload
