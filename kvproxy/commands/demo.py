"""`kvproxy demo`: simulated engines and the proxy on free ports, conversations through them, and what happened."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import TextIO

import httpx

from kvproxy.app import Proxy
from kvproxy.commands.demo_traffic import DemoReply, Mix, keep_trickling, run_mix
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
_BAR = 32
#: Of progress, where the output is no terminal; the last one is the end.
_LINES = 4


@dataclass(frozen=True, slots=True)
class DemoOptions:
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
class ProxyAddress:
    """Where the proxy listens; no admin listener unless it stays."""

    public: str
    admin: str = ""


def main(args: argparse.Namespace) -> int:
    """`kvproxy demo`."""
    return run(engines=args.engines, sessions=args.sessions, turns=args.turns, stay=args.stay, out=sys.stdout)


def run(*, engines: int, sessions: int, turns: int, stay: bool, out: TextIO) -> int:
    """Show it; 0 when every request was answered."""
    return run_loop(lambda: run_demo(DemoOptions(engines, sessions, turns, stay), out))


async def run_demo(demo: DemoOptions, out: TextIO) -> int:
    """The whole demo. Everything it starts lives in this task and ends with it, Ctrl-C included."""
    mix = Mix(MODEL, demo.sessions, demo.turns)
    results: dict[str, list[DemoReply]] = {}
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


async def _start_proxy(stack: AsyncExitStack, fleet: RunningFleet, policy: str, *, stays: bool) -> ProxyAddress:
    """round_robin is a plain proxy; kv_aware knows what the engines hold. One that stays has the usual ports."""
    aware = [{"kvcache": {"lmcache_endpoint": fleet.controller}}] if policy == _AWARE else []
    filters = ["request_id", "inference_request", *aware, "router"]
    config = load_config({"endpoints": fleet.endpoints, "policy": policy, "filters": filters})
    proxy = await stack.enter_async_context(Proxy(config, rng=Random(_SEED)))
    ports = [port if stays and _free(port) else 0 for port in (config.listen.port, config.admin.port)]
    public = await stack.enter_async_context(Server(proxy, port=ports[0], drain_s=1.0))
    proxy.public_url = public.url
    if not stays:
        return ProxyAddress(public.url)
    admin = await stack.enter_async_context(Server(proxy.admin, port=ports[1], drain_s=1.0))
    return ProxyAddress(public.url, admin.url)


async def _play(mix: Mix, url: str, policy: str, out: TextIO) -> list[DemoReply]:
    """The same conversations through a proxy with this policy."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        print(f"\n{policy}", file=out)
        with TrafficProgress(mix.requests, out) as progress:
            return await run_mix(mix, client, on_reply=progress.step)


async def _stay(mix: Mix, place: ProxyAddress, out: TextIO) -> None:
    """Keep the proxy up, with a trickle of conversations through it, until Ctrl-C."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    print_try_it(place.public, place.admin, MODEL, out)
    async with httpx.AsyncClient(base_url=place.public, timeout=60) as client, keep_trickling(mix, client):
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


class TrafficProgress:
    """A bar that is redrawn on a terminal, and a few plain lines elsewhere."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._done = self._cached = self._prompt = 0
        self._live = out.isatty()

    def __enter__(self) -> TrafficProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            print(file=self._out)

    def step(self, reply: DemoReply) -> None:
        """One more request was answered."""
        self._done += 1
        self._cached += reply.cached_tokens
        self._prompt += reply.prompt_tokens
        filled = _BAR * self._done // self._total
        share = self._cached / max(1, self._prompt)
        bar = "#" * filled + "." * (_BAR - filled)
        line = f"  [{bar}] {self._done}/{self._total}  {share:4.0%} of prompt tokens cached"
        if self._live:
            print(f"\r{line}", end="", flush=True, file=self._out)
        elif self._done * _LINES // self._total > (self._done - 1) * _LINES // self._total:
            print(line, flush=True, file=self._out)


def print_beginning(engines: int, mix: Mix, out: TextIO) -> None:
    """What is about to happen."""
    what = f"{mix.sessions} conversations of {mix.turns} turns"
    print(f"{what} through kvproxy, in front of {engines} simulated vLLM engines:", file=out)
    print("once routed by round_robin, once by kv_aware, which asks LMCache for the holders of a prompt.", file=out)


def print_table(results: Mapping[str, Sequence[DemoReply]], endpoints: Sequence[str], out: TextIO) -> None:
    """Per policy: requests by endpoint, what was cached, and how long the first token took (streamed requests)."""
    header = f"{'policy':<14}{'requests per endpoint':<32}{'cached':>8}{'TTFT mean':>12}{'p50':>9}{'p99':>9}"
    print(f"\n{header}\n{'-' * len(header)}", file=out)
    for policy, replies in results.items():
        shares = " ".join(f"{name}:{sum(r.endpoint == name for r in replies)}" for name in endpoints)
        cached = sum(r.cached_tokens for r in replies) / max(1, sum(r.prompt_tokens for r in replies))
        times = sorted(r.ttft_s for r in replies if r.streamed)
        mean, p50, p99 = map(_ms, (_mean_ttft_s(replies), _quantile(times, 0.5), _quantile(times, 0.99)))
        print(f"{policy:<14}{shares:<32}{cached:>8.0%}{mean:>12}{p50:>9}{p99:>9}", file=out)
    first, *others = results
    for policy in others:
        ratio = _mean_ttft_s(results[policy]) / _mean_ttft_s(results[first])
        if not math.isnan(ratio):
            print(f"\n{policy}: mean time to first token {ratio:.2f} x {first}'s, on the same conversations.", file=out)
    streamed = sum(r.streamed for replies in results.values() for r in replies)
    total = sum(len(replies) for replies in results.values())
    print(f"{streamed} of {total} requests were streamed; TTFT is theirs, as the client saw it.", file=out)


def print_try_it(url: str, admin_url: str, model: str, out: TextIO) -> None:
    """Lines that work as they are while the demo stays."""
    print(
        f"""
Live page: {admin_url}    (open it in a browser)

The proxy stays on {url} with a trickle of conversations running. Ctrl-C ends everything.

curl -N {url}/v1/chat/completions -H 'content-type: application/json' -H 'x-kvproxy-debug: 1' -i \\
  -d '{{"model": "{model}", "stream": true, "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}]}}'

pip install openai
python -c '
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
for part in client.chat.completions.create(model="{model}", stream=True, max_tokens=16,
                                           messages=[{{"role": "user", "content": "Hello"}}]):
    print(part.choices[0].delta.content or "", end="", flush=True)
'""",
        file=out,
    )


def _mean_ttft_s(replies: Sequence[DemoReply]) -> float:
    """NaN when none was streamed."""
    times = [reply.ttft_s for reply in replies if reply.streamed]
    return statistics.fmean(times) if times else math.nan


def _quantile(values: Sequence[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))] if values else math.nan


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.0f} ms"
