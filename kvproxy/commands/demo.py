"""`kvproxy demo`: simulated engines and the proxy on free ports, conversations through them, and what happened."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import TextIO

import httpx

from kvproxy.app import Proxy
from kvproxy.commands.demo_report import Progress, print_beginning, print_table, print_try_it
from kvproxy.commands.demo_traffic import Mix, Reply, run_mix, trickle
from kvproxy.commands.serve import run_loop
from kvproxy.config.load import load_config
from kvproxy.listener.server import Server
from kvproxy.simulator.engine_io import EngineSettings
from kvproxy.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.simulator.vllm_settings import VllmSettings

MODEL = "sim"
#: Each engine can hold about a third of the conversations: what is sent to the wrong one is computed again.
_CACHE_BLOCKS = 1024
_PLAIN, _AWARE = "round_robin", "kv_aware"
#: The same conversations, answers and draws each time; what is left is the machine's own noise.
_SEED = 7


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where the proxy listens; no admin listener unless it stays."""

    public: str
    admin: str = ""


def run(*, engines: int, sessions: int, turns: int, stay: bool, out: TextIO) -> int:
    """Show it; 0 when every request was answered."""
    return run_loop(lambda: show(Demo(engines, sessions, turns, stay), out))


async def show(demo: Demo, out: TextIO) -> int:
    """The whole demo. Everything it starts lives in this task and ends with it, Ctrl-C included."""
    mix = Mix(MODEL, demo.sessions, demo.turns)
    results: dict[str, list[Reply]] = {}
    async with AsyncExitStack() as lasting:
        fleet = await _start_fleet(lasting, demo.engines)
        place = await _start_proxy(lasting, fleet, _AWARE, stays=demo.stay)
        if demo.stay:
            print(f"live page: {place.admin}    (it fills when {_AWARE} has its turn)\n", file=out)
        print_beginning(demo.engines, mix, out)
        async with AsyncExitStack() as passing:  # a fleet of its own: nothing is cached from before
            plain = await _start_fleet(passing, demo.engines)
            passed = await _start_proxy(passing, plain, _PLAIN, stays=False)
            results[_PLAIN] = await _play(mix, passed.public, _PLAIN, out)
        results[_AWARE] = await _play(mix, place.public, _AWARE, out)
        print_table(results, list(fleet.endpoints), out)
        if demo.stay:
            await _stay(mix, place, out)
    return 0


async def _start_fleet(stack: AsyncExitStack, count: int) -> RunningFleet:
    """Engines and the controller they report to, each on a port of its own."""
    engine = VllmSettings(model=MODEL, engine=EngineSettings(_CACHE_BLOCKS, 16, token_outputs=True))
    settings = FleetSettings(clone_engines(engine, count))
    fleet = await stack.enter_async_context(Fleet(settings, rng=Random(_SEED)))
    assert fleet.controller is not None
    urls = {}
    for name, app in fleet.engines.items():
        urls[name] = (await stack.enter_async_context(Server(app, drain_s=1.0))).url
    controller = await stack.enter_async_context(Server(fleet.controller, drain_s=1.0))
    return RunningFleet(urls, controller.url)


async def _start_proxy(stack: AsyncExitStack, fleet: RunningFleet, policy: str, *, stays: bool) -> Place:
    """round_robin is a plain proxy; kv_aware knows what the engines hold. One that stays has the usual ports."""
    aware = [{"kvcache": {"lmcache_endpoint": fleet.controller}}] if policy == _AWARE else []
    filters = ["request_id", "inference_request", *aware, "router"]
    config = load_config({"endpoints": fleet.endpoints, "policy": policy, "filters": filters})
    proxy = await stack.enter_async_context(Proxy(config, rng=Random(_SEED)))
    ports = [port if stays and _free(port) else 0 for port in (config.listen.port, config.admin.port)]
    public = await stack.enter_async_context(Server(proxy, port=ports[0], drain_s=1.0))
    proxy.public_url = public.url
    if not stays:
        return Place(public.url)
    admin = await stack.enter_async_context(Server(proxy.admin, port=ports[1], drain_s=1.0))
    return Place(public.url, admin.url)


async def _play(mix: Mix, url: str, policy: str, out: TextIO) -> list[Reply]:
    """The same conversations through a proxy with this policy."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        print(f"\n{policy}", file=out)
        with Progress(mix.requests, out) as progress:
            return await run_mix(mix, client, on_reply=progress.step)


async def _stay(mix: Mix, place: Place, out: TextIO) -> None:
    """Keep the proxy up, with a trickle of conversations through it, until Ctrl-C."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    print_try_it(place.public, place.admin, MODEL, out)
    async with httpx.AsyncClient(base_url=place.public, timeout=60) as client, trickle(mix, client):
        await stop.wait()
    print("\nended", file=out)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server's own, for ports just left
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
