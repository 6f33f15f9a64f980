"""`kvproxy simulate`: simulated engines, LMCache and KV events on ports of their own, without a proxy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TextIO
from urllib.parse import urlsplit

import httpx

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.addresses import is_loopback
from kvproxy.cache.settings import KvCacheSettings, Provider
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import EngineKindSettings, Fleet, FleetSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.lab.simulator.sglang_settings import EventSettings, SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.listener.server import Server

#: Memory of an engine, and its tokens per second, unless options name them.
KV_TOKENS = 65_536
PREFILL_TOKENS_PER_S = 10_000


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine; port 0 is a free one. `replaces` is the URL of the engine it stands in for, "" for none."""

    name: str
    port: int
    models: tuple[str, ...]
    events_port: int = 0
    replay_port: int = 0
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Servers to start. `lmcache_port` None: no LMCache."""

    engines: tuple[PlannedEngine, ...]
    kind: str = "vllm"  # or sglang
    kv_events: bool = False
    lmcache_port: int | None = None
    coordinator: bool = False
    lmcache_replaces: str = ""
    kv_tokens: int = KV_TOKENS
    prefill_tokens_per_s: int = PREFILL_TOKENS_PER_S
    version: str = ""  # that engines report; "": that of the newest version simulated
    faults: tuple[tuple[str, dict[str, object]], ...] = field(default_factory=tuple)  # engine ("": all), changes


def plan_from_options(args: argparse.Namespace) -> SimulationPlan:
    """`--engines` equal ones on consecutive ports from `--port` on; port 0 takes free ones."""
    engines = tuple(
        PlannedEngine(f"sim-{number}", args.port + number if args.port else 0, (args.model,))
        for number in range(args.engines)
    )
    return SimulationPlan(
        engines,
        args.kind,
        args.kv_events,
        args.lmcache,
        kv_tokens=args.kv_tokens,
        prefill_tokens_per_s=args.prefill_speed,
        version=args.engine_version,
        faults=tuple(read_fault(text) for text in args.fault),
    )


def plan_from_config(config: Config, args: argparse.Namespace) -> SimulationPlan:
    """One engine for each endpoint of the file, on its own port if that is one of this machine; LMCache and KV events
    if the file uses them."""
    kvcache = next((one.settings for one in config.filters if isinstance(one.settings, KvCacheSettings)), None)
    engines = tuple(_engines_of(config, kvcache, args.model))
    if not engines:
        fix = "endpoints that are discovered have no stand-in"
        raise ConfigError([Problem("endpoints", "the file names none", fix)])
    lmcache = "" if kvcache is None else kvcache.lmcache_endpoint
    return SimulationPlan(
        engines,
        args.kind,
        kvcache is not None and (args.kv_events or bool(kvcache.kv_events)),
        _own_port(lmcache) if lmcache else args.lmcache,
        coordinator=kvcache is not None and kvcache.provider is Provider.COORDINATOR,
        lmcache_replaces=lmcache,
        kv_tokens=args.kv_tokens,
        prefill_tokens_per_s=args.prefill_speed,
        version=args.engine_version,
        faults=tuple(read_fault(text) for text in args.fault),
    )


def _engines_of(config: Config, kvcache: KvCacheSettings | None, model: str) -> Iterator[PlannedEngine]:
    names: set[str] = set()
    for cluster, settings in config.clusters.items():
        for one in settings.endpoints:
            name = one.instance_id or one.id
            name = f"{cluster}/{one.id}" if name in names else name
            names.add(name)
            events = _ports_of(one, kvcache)
            yield PlannedEngine(name, _own_port(one.url), one.models or (model,), *events, replaces=one.url)


def _ports_of(endpoint: EndpointSettings, kvcache: KvCacheSettings | None) -> tuple[int, int]:
    """Of KV events and their replay, where the file names them; 0 where the engine is asked."""
    sources = endpoint.kv_event_sources
    if not sources.endpoint and kvcache is not None:
        sources = kvcache.kv_event_sources
    return _event_port(sources.endpoint), _event_port(sources.replay_endpoint)


def _event_port(address: str) -> int:
    return int(address.rpartition(":")[2]) if address else 0


def _own_port(url: str) -> int:
    """Return the port of a plain URL of this machine; 0 for any other, which moves to a free port here."""
    parts = urlsplit(url)
    local = parts.scheme == "http" and is_loopback(parts.hostname or "") and parts.path in ("", "/")
    return (parts.port or 80) if local else 0


def read_fault(text: str) -> tuple[str, dict[str, object]]:
    """`[ENGINE:]NAME[=VALUE]`: the engine, "" for all, and the change. Raises ConfigError for any other text."""
    where, colon, change = text.rpartition(":")
    name, equals, value = change.partition("=")
    if not name.isidentifier() or (colon and not where):
        raise ConfigError([Problem("--fault", f"cannot be read: {text!r}", "as in sim-1:stall_first_byte_s=2")])
    return where, {name: _value_of(value) if equals else True}


def _value_of(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ConfigError([Problem("--fault", f"{text!r} is no number", "a number, true or false")]) from None


_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Simulation:
    """Where everything listens: engines by name, and LMCache ("": there is none)."""

    engines: Mapping[str, str]
    lmcache: str = ""


def main(args: argparse.Namespace) -> int:
    """`kvproxy simulate`."""
    if args.config is None:
        return run_loop(lambda: run(plan_from_options(args), out=sys.stdout))
    source = ConfigSource(path=args.config, lenient=args.lenient)
    plan = plan_from_config(source.load()[0], args)
    output = args.output
    moved = [one for one in plan.engines if not one.port]
    if output is None and (moved or plan.lmcache_port == 0):
        where = moved[0].replaces if moved else plan.lmcache_replaces
        what = f"{where} is not on this machine, so its stand-in has another address"
        raise ConfigError([Problem("", what, "-o FILE writes a copy of the configuration with the new addresses")])
    return run_loop(lambda: run(plan, out=sys.stdout, config=Path(args.config), output=output))


async def run(plan: SimulationPlan, *, out: TextIO, config: Path | None = None, output: Path | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM, with all addresses printed first."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with start(plan) as simulation:
        if config is not None and output is not None:
            write_moved(config, output, plan, simulation)
            print(f"wrote {output}: {config} with the addresses below", file=out)
        print_addresses(plan, simulation, out, config=output or config)
        out.flush()
        await stop.wait()
    return 0


@contextlib.asynccontextmanager
async def start(plan: SimulationPlan) -> AsyncIterator[Simulation]:
    """Everything in the plan, faults included. OSError for a port that is taken."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(_settings_of(plan), rng=Random()))
        urls = {}
        for one in plan.engines:
            server = Server(fleet.engines[one.name], port=one.port, drain_s=1.0)
            urls[one.name] = (await stack.enter_async_context(server)).url
        lmcache = fleet.coordinator if plan.coordinator else fleet.controller
        url = ""
        if lmcache is not None:
            url = (await stack.enter_async_context(Server(lmcache, port=plan.lmcache_port or 0, drain_s=1.0))).url
        await _switch_faults_on(plan, urls)
        yield Simulation(urls, url)


def _settings_of(plan: SimulationPlan) -> FleetSettings:
    engines = {one.name: _engine_of(plan, one) for one in plan.engines}
    with_lmcache = plan.lmcache_port is not None
    return FleetSettings(
        engines,
        ControllerSettings() if with_lmcache and not plan.coordinator else None,
        CoordinatorSettings() if with_lmcache and plan.coordinator else None,
    )


def _engine_of(plan: SimulationPlan, one: PlannedEngine) -> EngineKindSettings:
    timing = EngineTiming(prefill_tokens_per_s=float(plan.prefill_tokens_per_s))
    blocks = max(1, plan.kv_tokens // _BLOCK_TOKENS)
    engine = EngineSettings(blocks, _BLOCK_TOKENS, token_outputs=True, timing=timing)
    model, *others = one.models
    if plan.kind == "sglang":
        events = EventSettings(port=one.events_port, replay_port=one.replay_port) if plan.kv_events else None
        sglang = SglangSettings(model=model, engine=engine, kv_events=events)
        return replace(sglang, version=plan.version or sglang.version)
    publisher = PublisherSettings(port=one.events_port, replay_port=one.replay_port) if plan.kv_events else None
    vllm = VllmSettings(model=model, loras=tuple(others), engine=engine, kv_events=publisher)
    return replace(vllm, version=plan.version or vllm.version)


async def _switch_faults_on(plan: SimulationPlan, urls: Mapping[str, str]) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for name, changes in plan.faults:
            if name and name not in urls:
                raise ConfigError([Problem("--fault", f"there is no engine {name!r}", f"engines: {', '.join(urls)}")])
            for url in [urls[name]] if name else urls.values():
                answer = await client.post(f"{url}/sim/faults", json=changes)
                if answer.status_code != 200:
                    raise ConfigError([Problem("--fault", answer.text.strip()[:400])])


def write_moved(config: Path, output: Path, plan: SimulationPlan, simulation: Simulation) -> None:
    """Write a copy of the configuration with the addresses of the stand-ins."""
    output.write_text(move_addresses(config.read_text("utf-8"), plan, simulation), "utf-8")


def move_addresses(text: str, plan: SimulationPlan, simulation: Simulation) -> str:
    """Return the configuration's text with the addresses of the stand-ins; comments and everything else stay."""
    moves = {one.replaces: simulation.engines[one.name] for one in plan.engines if one.replaces}
    if plan.lmcache_replaces:
        moves[plan.lmcache_replaces] = simulation.lmcache
    for before in sorted(moves, key=len, reverse=True):
        if before not in text:
            raise ConfigError([Problem("", f"{before} is not in the file literally", "write the URL out")])
        text = text.replace(before, moves[before])
    return text


def print_addresses(plan: SimulationPlan, simulation: Simulation, out: TextIO, *, config: Path | None) -> None:
    """Print the servers with their addresses, and the next command."""
    name = {"vllm": "vLLM", "sglang": "SGLang"}[plan.kind]
    for one in plan.engines:
        print(f"{name} {one.name} ({', '.join(one.models)}) on {simulation.engines[one.name]}", file=out)
    if simulation.lmcache:
        kind = "coordinator" if plan.coordinator else "controller"
        print(f"LMCache {kind} on {simulation.lmcache}", file=out)
    if config is not None:
        print(f"\nkvproxy serve -c {config}", file=out)
    else:
        print(f"\n# config.yaml\n{_sample_config(plan, simulation)}", file=out)
    first = next(iter(simulation.engines.values()))
    print("\n# a fault while it runs: the next 5 requests fail", file=out)
    print(f"curl -s {first}/sim/faults -H 'content-type: application/json' -d '{{\"fail_next\": 5}}'", file=out)
    print("\nCtrl-C ends everything.", file=out)


def _sample_config(plan: SimulationPlan, simulation: Simulation) -> str:
    lines = ["endpoints:", *(f"  {name}: {url}" for name, url in simulation.engines.items())]
    if simulation.lmcache:
        lines += ["filters:", f"  kvcache: {{lmcache_endpoint: {simulation.lmcache}}}"]
    return "\n".join(lines)
