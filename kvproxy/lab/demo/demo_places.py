"""Servers of the demo: simulated engines and proxies, each on a port of its own."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from random import Random

from kvproxy.app import Proxy
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.retention import TierSettings
from kvproxy.lab.simulator.sglang_settings import EventSettings, SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import VllmSettings
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


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """Where everything listens: engines by endpoint id, and the controller that vLLM's report to."""

    endpoints: dict[str, str]
    controller: str = ""
    ranks: int = 1
    health: str = "/health"


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """Where the proxy listens; no admin listener unless it stays."""

    public: str
    admin: str = ""


async def start_fleet(stack: AsyncExitStack, demo: DemoOptions, *, told: bool = True) -> RunningFleet:
    """Engines and the controller they report to, each on a port of its own. SGLang's publish events instead, and those
    with host memory too, which unless `told` speak of engine memory alone."""
    engine = EngineSettings(_CACHE_BLOCKS, 16, token_outputs=True)
    if demo.tiers:
        engine = replace(engine, capacity_blocks=_DEVICE_BLOCKS, tiers=(_HOST,), timing=_PREFILL)
        events = PublisherSettings(device_only=not told)
        tiered = VllmSettings(model=MODEL, engine=engine, kv_events=events)
        settings = FleetSettings(clone_engines(tiered, demo.engines), None)
    elif demo.kind == "sglang":
        engine = replace(engine, capacity_blocks=_CACHE_BLOCKS // demo.ranks)
        sglang = SglangSettings(model=MODEL, engine=engine, kv_events=EventSettings(), dp_size=demo.ranks)
        settings = FleetSettings(clone_engines(sglang, demo.engines), None)
    else:
        settings = FleetSettings(clone_engines(VllmSettings(model=MODEL, engine=engine), demo.engines))
    fleet = await stack.enter_async_context(Fleet(settings, rng=Random(_SEED)))
    urls = {}
    for name, app in fleet.engines.items():
        urls[name] = (await stack.enter_async_context(Server(app, drain_s=1.0))).url
    if fleet.controller is None:
        health = "/ready" if demo.kind == "sglang" else "/health"
        return RunningFleet(urls, ranks=demo.ranks, health=health)
    controller = await stack.enter_async_context(Server(fleet.controller, drain_s=1.0))
    return RunningFleet(urls, controller.url)


async def start_proxy(stack: AsyncExitStack, fleet: RunningFleet, policy: str, *, stays: bool) -> ProxyAddress:
    """Start a proxy: a plain one for round_robin, one with the engines' cache contents for kv_aware. With `stays` it
    has the usual ports."""
    known = {"lmcache_endpoint": fleet.controller} if fleet.controller else {"kv_events": True}
    aware = [{"kvcache": known}] if policy == AWARE else []
    filters = ["request_id", "inference_request", *aware, "router"]
    more: dict[str, object] = {"health": {"path": fleet.health}}
    if policy == AWARE and fleet.ranks > 1:
        more["data_parallel"] = {"ranks": list(range(fleet.ranks))}
    config = load_config({"endpoints": fleet.endpoints, "policy": policy, "filters": filters, **more})
    proxy = await stack.enter_async_context(Proxy(config, rng=Random(_SEED)))
    ports = [port if stays and _free(port) else 0 for port in (config.listen.port, config.admin.port)]
    public = await stack.enter_async_context(Server(proxy, port=ports[0], drain_s=1.0))
    proxy.public_url = public.url
    if not stays:
        return ProxyAddress(public.url)
    admin = await stack.enter_async_context(Server(proxy.admin, port=ports[1], drain_s=1.0))
    return ProxyAddress(public.url, admin.url)


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
