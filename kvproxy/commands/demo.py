"""`kvproxy demo`: simulated engines and the proxy on free ports, conversations through them, and what happened."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TextIO

import httpx

from kvproxy.app import Proxy
from kvproxy.commands.demo_report import Progress, print_table, print_try_it
from kvproxy.commands.demo_traffic import Mix, Reply, run_mix
from kvproxy.commands.serve import run_loop
from kvproxy.config.load import load_mapping
from kvproxy.listener.server import Server
from kvproxy.simulator.engine_io import EngineSettings
from kvproxy.simulator.fleet import Fleet, FleetSettings, engines_like
from kvproxy.simulator.vllm_settings import VllmSettings

MODEL = "sim"
#: Each engine can hold about a third of the conversations: what is sent to the wrong one is computed again.
_CACHE_BLOCKS = 1024
_POLICIES = ("round_robin", "kv_aware")


@dataclass(frozen=True, slots=True)
class Demo:
    """What to show."""

    engines: int
    sessions: int
    turns: int
    stay: bool


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """Where everything listens: engines by endpoint id, and the controller."""

    endpoints: dict[str, str]
    controller: str


def run(*, engines: int, sessions: int, turns: int, stay: bool, out: TextIO) -> int:
    """Show it; 0 when every request was answered."""
    return run_loop(lambda: show(Demo(engines, sessions, turns, stay), out))


async def show(demo: Demo, out: TextIO) -> int:
    """The whole demo. Everything it starts lives in this task and ends with it, Ctrl-C included."""
    mix = Mix(MODEL, demo.sessions, demo.turns)
    results: dict[str, list[Reply]] = {}
    for policy in _POLICIES:
        async with AsyncExitStack() as stack:  # a fleet of its own each: nothing is cached from before
            fleet = await _start_fleet(stack, demo.engines)
            results[policy] = await _play(mix, fleet, policy, out)
            if policy == _POLICIES[-1]:
                print_table(results, list(fleet.endpoints), out)
                if demo.stay:
                    await _stay(stack, fleet, out)
    return 0


async def _start_fleet(stack: AsyncExitStack, count: int) -> RunningFleet:
    """Engines and the controller they report to, each on a port of its own."""
    engine = VllmSettings(model=MODEL, engine=EngineSettings(_CACHE_BLOCKS, 16, token_outputs=True))
    fleet = await stack.enter_async_context(Fleet(FleetSettings(engines_like(engine, count))))
    assert fleet.controller is not None
    urls = {}
    for name, app in fleet.engines.items():
        urls[name] = (await stack.enter_async_context(Server(app, drain_s=1.0))).url
    controller = await stack.enter_async_context(Server(fleet.controller, drain_s=1.0))
    return RunningFleet(urls, controller.url)


def _proxy(fleet: RunningFleet, policy: str) -> Proxy:
    """round_robin is a plain proxy; kv_aware knows what the engines hold."""
    aware = [{"kvcache": {"lmcache_endpoint": fleet.controller}}] if policy != "round_robin" else []
    filters = ["request_id", "inference_request", *aware, "router"]
    return Proxy(load_mapping({"endpoints": fleet.endpoints, "policy": policy, "filters": filters}))


async def _play(mix: Mix, fleet: RunningFleet, policy: str, out: TextIO) -> list[Reply]:
    """The same conversations through a proxy with this policy."""
    async with (
        _proxy(fleet, policy) as proxy,
        Server(proxy, drain_s=1.0) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        engines = ", ".join(f"{name} {url}" for name, url in fleet.endpoints.items())
        print(f"\nsimulated vLLM engines: {engines}; LMCache controller {fleet.controller}", file=out)
        print(f"{policy}: {mix.sessions} conversations of {mix.turns} turns through {server.url}", file=out)
        with Progress(mix.requests, out) as progress:
            return await run_mix(mix, client, on_reply=progress.step)


async def _stay(stack: AsyncExitStack, fleet: RunningFleet, out: TextIO) -> None:
    """Keep a proxy up until Ctrl-C."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    proxy = await stack.enter_async_context(_proxy(fleet, _POLICIES[-1]))
    public = await stack.enter_async_context(Server(proxy, drain_s=1.0))
    admin = await stack.enter_async_context(Server(proxy.admin, drain_s=1.0))
    print_try_it(public.url, admin.url, MODEL, out)
    await stop.wait()
    print("\nended", file=out)
