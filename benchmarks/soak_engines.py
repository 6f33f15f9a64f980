"""Simulated engines on given ports, with or without LMCache's controller and KV events.

`python -m benchmarks.soak_engines [--controller PORT] [--time-scale X] [--no-kv-events] PORT...`
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import AsyncExitStack

import uvloop

from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.proxy.listener.server import Server

MODEL = "sim"


async def main(ports: list[int], controller: int, time_scale: float, kv_events: bool) -> None:
    """Serve until the process is ended."""
    engine = EngineSettings(2048, 16, token_outputs=True, timing=EngineTiming(time_scale=time_scale))
    publisher = PublisherSettings() if kv_events else None
    settings = VllmSettings(model=MODEL, engine=engine, kv_events=publisher, default_output_tokens=16)
    with_controller = ControllerSettings() if controller else None
    names = {f"e{port}": settings for port in ports}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            Fleet(FleetSettings(names, controller=with_controller), rng=random.Random(1))
        )
        for name, app in fleet.engines.items():
            await stack.enter_async_context(Server(app, port=int(name[1:]), drain_s=0.1))
        if fleet.controller is not None:
            await stack.enter_async_context(Server(fleet.controller, port=controller, drain_s=0.1))
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--controller", type=int, default=0)
    parser.add_argument("--time-scale", type=float, default=0.5, help="above 1 the engines are slower")
    parser.add_argument("--no-kv-events", action="store_true", help="the engines publish none")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.ports, arguments.controller, arguments.time_scale, not arguments.no_kv_events))
