"""A simulated cluster on loopback, and a visit to it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import EngineKindSettings, Fleet, FleetSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import check_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.checks import diagnose_setup
from kvproxy.operate.doctor.report import DoctorReport, Finding
from kvproxy.operate.doctor.tools import Tools, VisitTimeouts
from tests.support.loopback import serve
from tests.support.vllms import KINDS

FAST = EngineSettings(512, 16, token_outputs=True, timing=EngineTiming(time_scale=0.001))
ENGINE = VllmSettings(model="sim", root="sim", max_model_len=8192, engine=FAST, kv_events=PublisherSettings())

#: Nothing here waits for nothing for long; exchanges have time, since they end by themselves.
TIMEOUTS = VisitTimeouts(exchange_s=20.0, event_s=20.0, lookup_tries=2, lookup_pause_s=0.001)
SHORT = VisitTimeouts(exchange_s=20.0, event_s=0.05, lookup_tries=2, lookup_pause_s=0.001)

#: Of all visits: prompts of an earlier one are in the caches.
_PROMPTS = random.Random(7)

#: A budget that no machine misses: how long lookups take is tested apart.
BUDGET = {"lookup_routing_timeout": "60s", "request_timeout": "60s"}


@dataclass
class Cluster:
    """Served engines and services."""

    fleet: Fleet
    urls: dict[str, str]
    controller: str = ""
    coordinator: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, *, kvcache: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """Return a good configuration of all of it, as a file would hold it."""
        settings = {"kv_events": True, "lmcache_endpoint": self.controller or self.coordinator, **BUDGET}
        raw: dict[str, Any] = {
            "endpoints": dict(self.urls),
            "policy": "kv_aware",
            "filters": ["inference_request", {"kvcache": {**settings, **(kvcache or {})}}, "router"],
        }
        return {**raw, **changes}


@contextlib.asynccontextmanager
async def cluster(
    engines: Mapping[str, EngineKindSettings] | None = None,
    *,
    controller: ControllerSettings | None = ControllerSettings(),
    coordinator: CoordinatorSettings | None = None,
) -> AsyncIterator[Cluster]:
    """Two equal engines and a controller, unless said otherwise; everything runs inside the block."""
    given = dict(engines) if engines is not None else {"a": ENGINE, "b": ENGINE}
    fleet = Fleet(FleetSettings(given, controller, coordinator), rng=random.Random(1), kinds=KINDS)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(fleet)
        urls = {name: await stack.enter_async_context(serve(app)) for name, app in fleet.engines.items()}
        served = Cluster(fleet, urls)
        if fleet.controller is not None:
            served.controller = await stack.enter_async_context(serve(fleet.controller))
        if fleet.coordinator is not None:
            served.coordinator = await stack.enter_async_context(serve(fleet.coordinator))
        yield served


def parsed(raw: Mapping[str, Any]) -> Config:
    """Return the configuration of a mapping that must be a good one."""
    config, problems = check_config(dict(raw), env={})
    assert config is not None, problems
    return config


async def visit(raw: Mapping[str, Any], *, timeouts: VisitTimeouts = TIMEOUTS, **tools: Any) -> DoctorReport:
    """Return the report of `kvproxy doctor`."""
    config, problems = check_config(dict(raw), env={})
    given = Tools(timeouts=timeouts, rng=_PROMPTS, **tools)
    return await diagnose_setup(config, problems, tools=given, open_files=10**9)


def only(report: DoctorReport) -> Finding:
    """Return the only finding."""
    assert len(report.findings) == 1, report.findings
    return report.findings[0]
