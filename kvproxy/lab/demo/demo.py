"""`kvproxy demo`: simulated engines and the proxy on free ports, conversations through them, and what happened."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import socket
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random
from typing import TextIO

import httpx

from kvproxy.app import Proxy
from kvproxy.lab.demo.demo_traffic import DemoReply, Mix, keep_trickling, run_mix
from kvproxy.lab.demo.kill import run_kill
from kvproxy.lab.replay.results import percentile
from kvproxy.lab.served import serve_fleet
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import FleetSettings, clone_engines
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.retention import TierSettings
from kvproxy.lab.simulator.sglang_settings import EventSettings, SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import NixlLinks, VllmSettings
from kvproxy.operate.commands.progress import ProgressBar
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

MODEL = "sim"
#: Each engine can hold about a third of the conversations: a turn sent to the wrong one is computed again.
_CACHE_BLOCKS = 1024
#: The same conversations, answers and draws each time; the rest is the machine's own noise.
_SEED = 7
PLAIN = "round_robin"
AWARE = "kv_aware"
#: With `--tiers`: blocks of each engine, for some conversations and for all of them. 0.2 ms a block is 10 GB/s of a
#: model with 128 KiB a token; the prefill is as slow as that of a large one.
_DEVICE_BLOCKS = 480
_HOST = TierSettings("CPU", 12 * _DEVICE_BLOCKS, 0.000_2, 0.001)
_PREFILL = EngineTiming(prefill_tokens_per_s=5_000.0)
#: With `--disaggregated`, for the first pair of engines to be proven.
_PROVEN_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo."""

    engines: int
    sessions: int
    turns: int
    stay: bool
    kind: str = "vllm"  # or `sglang`
    ranks: int = 1  # data-parallel, of each engine; SGLang's
    tiers: bool = False  # of host memory: with and without the proxy knowing of it
    pause_s: float = 1.0  # with `tiers`, between turns: others' push a conversation out of engine memory meanwhile
    disaggregated: bool = False  # half of the engines prefill for the others, and all of them do both


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """Where everything listens: engines by endpoint id, and the controller that vLLM's report to."""

    endpoints: dict[str, str]
    controller: str = ""
    ranks: int = 1
    health: str = "/health"
    disaggregated: bool = False

    def list_endpoints(self) -> list[dict[str, str]]:
        """Return them as a configuration has them; with `disaggregated` the first half prefills."""
        first = len(self.endpoints) // 2
        roles = [("prefill" if number < first else "decode") for number in range(len(self.endpoints))]
        named = zip(self.endpoints.items(), roles, strict=True)
        return [{"id": name, "url": url, "role": role if self.disaggregated else "both"} for (name, url), role in named]


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """Where the proxy listens; no admin listener unless it stays."""

    public: str
    admin: str = ""
    count_legs: Callable[[], float] = lambda: 0.0  # requests whose prompt another engine computed


async def start_fleet(stack: AsyncExitStack, demo: DemoOptions, *, told: bool = True) -> RunningFleet:
    """Engines and the controller they report to, each on a port of its own. SGLang's publish events instead, and those
    with host memory too, which unless `told` speak of engine memory alone."""
    engine = EngineSettings(_CACHE_BLOCKS, 16, token_outputs=True)
    if demo.tiers:
        engine = replace(engine, capacity_blocks=_DEVICE_BLOCKS, tiers=(_HOST,), timing=_PREFILL)
        events = PublisherSettings(device_only=not told)
        tiered = VllmSettings(model=MODEL, engine=engine, kv_events=events)
        settings = FleetSettings(clone_engines(tiered, demo.engines), None)
    elif demo.disaggregated:
        engine = replace(engine, capacity_blocks=4 * _CACHE_BLOCKS, timing=_PREFILL)
        apart = VllmSettings(model=MODEL, engine=engine, kv_events=PublisherSettings(), nixl=NixlLinks())
        settings = FleetSettings(clone_engines(apart, demo.engines), None)
    elif demo.kind == "sglang":
        engine = replace(engine, capacity_blocks=_CACHE_BLOCKS // demo.ranks)
        sglang = SglangSettings(model=MODEL, engine=engine, kv_events=EventSettings(), dp_size=demo.ranks)
        settings = FleetSettings(clone_engines(sglang, demo.engines), None)
    else:
        settings = FleetSettings(clone_engines(VllmSettings(model=MODEL, engine=engine), demo.engines))
    fleet = await stack.enter_async_context(serve_fleet(settings, rng=Random(_SEED)))
    health = "/ready" if demo.kind == "sglang" else "/health"
    return RunningFleet(fleet.engines, fleet.lmcache, demo.ranks, health, disaggregated=demo.disaggregated and told)


async def start_proxy(stack: AsyncExitStack, fleet: RunningFleet, policy: str, *, stays: bool) -> ProxyAddress:
    """Start a proxy: a plain one for round_robin, one with the engines' cache contents for kv_aware. With `stays` it
    has the usual ports."""
    known = {"lmcache_endpoint": fleet.controller} if fleet.controller else {"kv_events": True}
    aware = [{"kvcache": known}] if policy == AWARE else []
    filters = ["request_id", "inference_request", *aware, "router"]
    more: dict[str, object] = {"health": {"path": fleet.health}}
    if policy == AWARE and fleet.ranks > 1:
        more["data_parallel"] = {"ranks": list(range(fleet.ranks))}
    if fleet.disaggregated:
        more["disaggregation"] = {"connector": "nixl"}
    config = load_config({"endpoints": fleet.list_endpoints(), "policy": policy, "filters": filters, **more})
    proxy = await stack.enter_async_context(Proxy(config, rng=Random(_SEED)))
    ports = [port if stays and _free(port) else 0 for port in (config.listen.port, config.admin.port)]
    public = await stack.enter_async_context(Server(proxy, port=ports[0], drain_s=1.0))
    proxy.public_url = public.url

    def read(name: str, **labels: str) -> float:
        return proxy.metrics.registry.get_sample_value(name, {"cluster": "default", **labels}) or 0.0

    count_legs = partial(read, "kvproxy_disaggregated_requests_total", result="pulled")
    if fleet.disaggregated:
        async with asyncio.timeout(_PROVEN_S):
            while not read("kvproxy_disaggregation_pairs", state="good"):  # noqa: ASYNC110 - a gauge, no event
                await asyncio.sleep(0.1)
    if not stays:
        return ProxyAddress(public.url, count_legs=count_legs)
    admin = await stack.enter_async_context(Server(proxy.admin, port=ports[1], drain_s=1.0))
    return ProxyAddress(public.url, admin.url, count_legs)


def price_prompt(tokens: int) -> tuple[float, float]:
    """Seconds to bring so many tokens up from host memory, and to compute them."""
    return _HOST.latency_s + -(-tokens // 16) * _HOST.read_block_s, _PREFILL.prefill_s(tokens, 0)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server's own, for ports just left
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


#: Tasks that want to run for each core, from which on a machine is busy.
_BUSY = 1.5
#: Names of the engines, and the proxy's source of their cache contents.
_KINDS = {
    "vllm": ("vLLM", "looks prompts up in LMCache"),
    "sglang": ("SGLang", "follows the events of their caches"),
}
#: Contenders without `--tiers` and with.
_CONTENDERS = {False: (PLAIN, AWARE), True: ("tier-blind", "tier-aware")}
_APART = "together", "apart"
_CONVERSATION = 3000  # tokens, about
_TIERS = """\
Each engine's own memory holds the KV of two and a half conversations; host memory behind it keeps all of them. To bring
one up from there takes {read}, to compute it again {computed}, and only the engine that computed it has it there.
Both runs are routed by kv_aware, which follows the engines' KV events: tier-blind sees engine memory alone,
tier-aware host memory too."""


def main(args: argparse.Namespace) -> int:
    """`kvproxy demo`."""
    if args.ranks > 1 and args.kind != "sglang":
        sys.stderr.write("kvproxy demo: --ranks needs --engine sglang\n")
        return 2
    if args.tiers and args.kind != "vllm":
        sys.stderr.write("kvproxy demo: --tiers needs --engine vllm\n")
        return 2
    if args.disaggregated and (args.kind != "vllm" or args.tiers or args.engines < 2):
        sys.stderr.write("kvproxy demo: --disaggregated needs two engines of --engine vllm, without --tiers\n")
        return 2
    sessions = args.sessions or (12 if args.tiers else 15)
    if args.kill_an_engine:
        return run_loop(lambda: run_kill(sessions, sys.stdout))
    options = DemoOptions(args.engines, sessions, args.turns, args.stay, args.kind, args.ranks, args.tiers)
    options = replace(options, disaggregated=args.disaggregated)
    return run(options, out=sys.stdout)


def run(demo: DemoOptions, *, out: TextIO) -> int:
    """Show it; 0 when every request was answered."""
    return run_loop(lambda: run_demo(demo, out))


async def run_demo(demo: DemoOptions, out: TextIO) -> int:
    """Return the whole demo. Everything it starts lives in this task and ends with it, Ctrl-C included."""
    mix = Mix(MODEL, demo.sessions, demo.turns)
    if demo.tiers:
        mix = replace(mix, pause_s=demo.pause_s, completions=False)
    results: dict[str, list[DemoReply]] = {}
    before, after = _APART if demo.disaggregated else _CONTENDERS[demo.tiers]
    async with AsyncExitStack() as lasting:
        fleet = await start_fleet(lasting, demo)
        place = await start_proxy(lasting, fleet, AWARE, stays=demo.stay)
        if demo.stay:
            print(f"live page: {place.admin}    (it fills when {after} has its turn)\n", file=out)
        print_beginning(demo, mix, out)
        async with AsyncExitStack() as passing:  # a fleet of its own, with empty caches
            plain = await start_fleet(passing, demo, told=False)
            aware = demo.tiers or demo.disaggregated
            passed = await start_proxy(passing, plain, AWARE if aware else PLAIN, stays=False)
            results[before] = await _play(mix, passed.public, before, out)
        results[after] = await _play(mix, place.public, after, out)
        print_table(results, out)
        if demo.tiers:
            print_later_turns(results, out)
        if demo.disaggregated:
            roles = ", ".join(f"{one['id']} {one['role']}" for one in fleet.list_endpoints())
            print(
                f"{after}: {roles}. {place.count_legs():.0f} of {mix.requests} prompts were computed at\n"
                "another engine, where the first token was expected earlier by it. Fewer engines answer than together.",
                file=out,
            )
            print_pauses(results, out)
        if demo.stay:
            await _stay(mix, place, out)
    return 0


async def _play(mix: Mix, url: str, policy: str, out: TextIO) -> list[DemoReply]:
    """Return the same conversations through a proxy with this policy."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        bar = ProgressBar(mix.requests, out=out)
        bar.begin(policy)
        answered = count(1)
        replies = await run_mix(mix, client, on_reply=lambda _: bar.advance(next(answered)))
        bar.close()
        return replies


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


def print_beginning(demo: DemoOptions, mix: Mix, out: TextIO) -> None:
    """Print the introduction."""
    what = f"{mix.sessions} conversations of {mix.turns} turns"
    if demo.tiers:
        print(f"{what} through kvproxy, in front of {demo.engines} simulated vLLM engines with host memory.", file=out)
        read_s, computed_s = price_prompt(_CONVERSATION)
        print(_TIERS.format(read=_ms(read_s), computed=_ms(computed_s)), file=out)
        return
    if demo.disaggregated:
        print(f"{what} through kvproxy, in front of {demo.engines} simulated vLLM engines with NIXL:", file=out)
        print("once each of them does both, once half of them compute long prompts for the others to answer.", file=out)
        print("Each has memory for the KV of all conversations.", file=out)
        return
    name, how = _KINDS[demo.kind]
    ranks = f" with {demo.ranks} data-parallel ranks each" if demo.ranks > 1 else ""
    print(f"{what} through kvproxy, in front of {demo.engines} simulated {name} engines{ranks}:", file=out)
    print(f"once routed by round_robin, once by kv_aware, which {how}.", file=out)


def print_table(
    results: Mapping[str, Sequence[DemoReply]],
    out: TextIO,
    *,
    load: Callable[[], tuple[float, float, float]] = os.getloadavg,
) -> None:
    """Per policy: requests by endpoint, what was cached, and how long the first token took (streamed requests). On a
    busy machine the times are those of the machine: it is named, and no times are compared."""
    header = f"{'policy':<14}{'requests per endpoint':<32}{'cached':>8}{'TTFT mean':>12}{'p50':>9}{'p99':>9}"
    print(f"\n{header}\n{'-' * len(header)}", file=out)
    for policy, replies in results.items():
        served = sorted(Counter(reply.endpoint for reply in replies).items())
        shares = " ".join(f"{name}:{count}" for name, count in served)
        cached = sum(r.cached_tokens for r in replies) / max(1, sum(r.prompt_tokens for r in replies))
        times = sorted(r.ttft_s for r in replies if r.streamed)
        mean, p50, p99 = map(_ms, (_mean_ttft_s(replies), percentile(times, 0.5), percentile(times, 0.99)))
        print(f"{policy:<14}{shares:<32}{cached:>8.0%}{mean:>12}{p50:>9}{p99:>9}", file=out)
    first, *others = results
    cores = os.cpu_count() or 1
    busy = load()[0] > _BUSY * cores
    for policy in others:
        computed = _computed_tokens(results[policy]) / max(1, _computed_tokens(results[first]))
        print(f"\n{policy}: {computed:.2f} x the prompt tokens that {first} computed, same conversations.", file=out)
        ratio = _mean_ttft_s(results[policy]) / _mean_ttft_s(results[first])
        if not math.isnan(ratio) and not busy:
            print(f"{policy}: mean time to first token {ratio:.2f} x {first}'s.", file=out)
    if busy:
        reason = f"This machine is busy (load {load()[0]:.0f} on {cores} cores)"
        print(f"{reason}: the times of the two policies do not compare.", file=out)
    streamed = sum(r.streamed for replies in results.values() for r in replies)
    total = sum(len(replies) for replies in results.values())
    print(f"{streamed} of {total} requests were streamed; TTFT is theirs, as the client saw it.", file=out)


def _computed_tokens(replies: Sequence[DemoReply]) -> int:
    return sum(reply.prompt_tokens - reply.cached_tokens for reply in replies)


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


def print_pauses(results: Mapping[str, Sequence[DemoReply]], out: TextIO) -> None:
    """Print how long answers stood still while other prompts were computed."""
    for policy, replies in results.items():
        pauses = sorted(reply.pause_s for reply in replies if reply.streamed)
        p50, p99 = map(_ms, (percentile(pauses, 0.5), percentile(pauses, 0.99)))
        print(f"{policy}: longest pause within an answer: p50 {p50}, p99 {p99}", file=out)


def print_later_turns(results: Mapping[str, Sequence[DemoReply]], out: TextIO) -> None:
    """Print the benefit for turns with KV in host memory: every turn but the first."""
    print("\nOf the later turns, on average:", file=out)
    for name, replies in results.items():
        later = [reply for reply in replies if reply.turn > 1]
        tokens = sum(reply.prompt_tokens for reply in later) / max(1, len(later))
        again = sum(reply.prompt_tokens - reply.cached_tokens for reply in later) / max(1, len(later))
        print(
            f"  {name}: {again:.0f} of {tokens:.0f} prompt tokens computed, first token after "
            f"{_ms(_mean_ttft_s(later))}",
            file=out,
        )


def _mean_ttft_s(replies: Sequence[DemoReply]) -> float:
    """NaN when none was streamed."""
    times = [reply.ttft_s for reply in replies if reply.streamed]
    return statistics.fmean(times) if times else math.nan


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.0f} ms"
