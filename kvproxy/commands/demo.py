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
_POLICIES = ("round_robin", "session")


@dataclass(frozen=True, slots=True)
class Demo:
    """What to show."""

    engines: int
    sessions: int
    turns: int
    stay: bool


def run(*, engines: int, sessions: int, turns: int, stay: bool, out: TextIO) -> int:
    """Show it; 0 when every request was answered."""
    return run_loop(lambda: show(Demo(engines, sessions, turns, stay), out))


async def show(demo: Demo, out: TextIO) -> int:
    """The whole demo. Everything it starts lives in this task and ends with it, Ctrl-C included."""
    mix = Mix(MODEL, demo.sessions, demo.turns)
    async with AsyncExitStack() as stack:
        endpoints, controller = await _start_fleet(stack, demo.engines)
        ids = list(endpoints)
        for name, url in endpoints.items():
            print(f"simulated vLLM {name} on {url}", file=out)
        print(f"simulated LMCache controller on {controller}", file=out)
        results: dict[str, list[Reply]] = {}
        for policy in _POLICIES:
            results[policy] = await _play(mix, endpoints, policy, out)
        print_table(results, ids, out)
        if demo.stay:
            await _stay(stack, endpoints, out)
    return 0


async def _start_fleet(stack: AsyncExitStack, count: int) -> tuple[dict[str, str], str]:
    """Engines by endpoint id, and the controller they report to: their URLs."""
    engine = VllmSettings(model=MODEL, engine=EngineSettings(2048, 16, token_outputs=True))
    fleet = await stack.enter_async_context(Fleet(FleetSettings(engines_like(engine, count))))
    assert fleet.controller is not None
    urls = {}
    for name, app in fleet.engines.items():
        urls[name] = (await stack.enter_async_context(Server(app, drain_s=1.0))).url
    controller = await stack.enter_async_context(Server(fleet.controller, drain_s=1.0))
    return urls, controller.url


def _proxy(endpoints: dict[str, str], policy: str) -> Proxy:
    return Proxy(load_mapping({"endpoints": endpoints, "policy": policy}))


async def _play(mix: Mix, endpoints: dict[str, str], policy: str, out: TextIO) -> list[Reply]:
    """The same conversations through a proxy with this policy, engines emptied first."""
    async with (
        _proxy(endpoints, policy) as proxy,
        Server(proxy, drain_s=1.0) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        for url in endpoints.values():
            await client.post(f"{url}/reset_prefix_cache")
        print(f"\n{policy}: {mix.sessions} conversations of {mix.turns} turns through {server.url}", file=out)
        with Progress(mix.requests, out) as progress:
            return await run_mix(mix, client, on_reply=progress.step)


async def _stay(stack: AsyncExitStack, endpoints: dict[str, str], out: TextIO) -> None:
    """Keep a proxy up until Ctrl-C."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    proxy = await stack.enter_async_context(_proxy(endpoints, _POLICIES[-1]))
    public = await stack.enter_async_context(Server(proxy, drain_s=1.0))
    admin = await stack.enter_async_context(Server(proxy.admin, drain_s=1.0))
    print_try_it(public.url, admin.url, MODEL, out)
    await stop.wait()
    print("\nended", file=out)
