"""`kvproxy simulate`: simulated engines, LMCache and KV events on ports of their own, without a proxy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TextIO
from urllib.parse import urlsplit

import httpx

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.addresses import is_loopback
from kvproxy.cache.feature import find_reports
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.lab.served import ServedFleet, serve_fleet
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import EngineKindSettings, FleetSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.lab.simulator.sglang_settings import EventSettings, SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.config.schema import Config

_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Servers to start, and the URLs in a configuration that they stand in for (LMCache's name is "")."""

    fleet: FleetSettings
    ports: Mapping[str, int]  # of engines by name; 0: a free one
    faults: Sequence[tuple[str, dict[str, object]]]  # engine ("": all), changes
    lmcache_port: int = 0
    replaced: Mapping[str, str] = field(default_factory=dict)  # URL -> name


def plan_from_options(args: argparse.Namespace) -> SimulationPlan:
    """`--engines` equal ones on consecutive ports from `--port` on; port 0 takes free ones."""
    ports = {f"sim-{number}": args.port + number if args.port else 0 for number in range(args.engines)}
    engines = {name: _make_engine(args, (args.model,), (0, 0) if args.kv_events else None) for name in ports}
    controller = None if args.lmcache is None else ControllerSettings()
    return SimulationPlan(FleetSettings(engines, controller), ports, _read_faults(args), args.lmcache or 0)


def plan_from_config(config: Config, args: argparse.Namespace) -> SimulationPlan:
    """One engine for each endpoint of the file, on its own port if that is one of this machine; LMCache and KV events
    if the file uses them."""
    kvcache = next((one.settings for one in config.filters if isinstance(one.settings, KvCacheSettings)), None)
    publishes = kvcache is not None and (args.kv_events or find_reports(kvcache) is not None)
    engines: dict[str, EngineKindSettings] = {}
    ports: dict[str, int] = {}
    replaced: dict[str, str] = {}
    for cluster, settings in config.clusters.items():
        for one in settings.endpoints:
            name = one.instance_id or one.id
            name = f"{cluster}/{one.id}" if name in engines else name
            replaced[one.url] = name
            ports[name] = _own_port(one.url)
            engines[name] = _make_engine(
                args, one.models or (args.model,), _ports_of(one, kvcache) if publishes else None
            )
    if not engines:
        fix = "endpoints that are discovered have no stand-in"
        raise ConfigError([Problem("endpoints", "the file names none", fix)])
    lmcache = getattr(kvcache, "lmcache_endpoint", "")
    if lmcache:
        replaced[lmcache] = ""
    coordinates = getattr(kvcache, "provider", "") == "coordinator"
    has_lmcache = bool(lmcache) or args.lmcache is not None
    fleet = FleetSettings(
        engines,
        ControllerSettings() if has_lmcache and not coordinates else None,
        CoordinatorSettings() if has_lmcache and coordinates else None,
    )
    port = _own_port(lmcache) if lmcache else args.lmcache or 0
    return SimulationPlan(fleet, ports, _read_faults(args), port, replaced)


def _make_engine(
    args: argparse.Namespace, models: Sequence[str], event_ports: tuple[int, int] | None
) -> EngineKindSettings:
    """Return an engine of these models, which publishes KV events if it has ports for them and their replay."""
    timing = EngineTiming(prefill_tokens_per_s=float(args.prefill_speed))
    blocks = max(1, args.kv_tokens // _BLOCK_TOKENS)
    engine = EngineSettings(blocks, _BLOCK_TOKENS, token_outputs=True, timing=timing)
    model, *others = models
    version = {"version": args.engine_version} if args.engine_version else {}
    if args.kind == "sglang":
        events = None if event_ports is None else EventSettings(port=event_ports[0], replay_port=event_ports[1])
        return SglangSettings(model=model, engine=engine, kv_events=events, **version)
    publisher = None if event_ports is None else PublisherSettings(port=event_ports[0], replay_port=event_ports[1])
    return VllmSettings(model=model, loras=tuple(others), engine=engine, kv_events=publisher, **version)


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


def _read_faults(args: argparse.Namespace) -> list[tuple[str, dict[str, object]]]:
    return [read_fault(text) for text in args.fault]


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


def main(args: argparse.Namespace) -> int:
    """`kvproxy simulate`."""
    if args.config is None:
        return run_loop(lambda: run(plan_from_options(args), out=sys.stdout))
    source = ConfigSource(path=args.config, lenient=args.lenient)
    plan = plan_from_config(source.load()[0], args)
    output = args.output
    moved = [url for url in plan.replaced if not _own_port(url)]
    if output is None and moved:
        where = moved[0]
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
async def start(plan: SimulationPlan) -> AsyncIterator[ServedFleet]:
    """Everything in the plan, faults included. OSError for a port that is taken."""
    async with serve_fleet(plan.fleet, rng=Random(), ports=plan.ports, lmcache_port=plan.lmcache_port) as simulation:
        await _switch_faults_on(plan, simulation.engines)
        yield simulation


async def _switch_faults_on(plan: SimulationPlan, urls: Mapping[str, str]) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for name, changes in plan.faults:
            if name and name not in urls:
                raise ConfigError([Problem("--fault", f"there is no engine {name!r}", f"engines: {', '.join(urls)}")])
            for url in [urls[name]] if name else urls.values():
                answer = await client.post(f"{url}/sim/faults", json=changes)
                if answer.status_code != 200:
                    raise ConfigError([Problem("--fault", answer.text.strip()[:400])])


def write_moved(config: Path, output: Path, plan: SimulationPlan, simulation: ServedFleet) -> None:
    """Write a copy of the configuration with the addresses of the stand-ins."""
    output.write_text(move_addresses(config.read_text("utf-8"), plan, simulation), "utf-8")


def move_addresses(text: str, plan: SimulationPlan, simulation: ServedFleet) -> str:
    """Return the configuration's text with the addresses of the stand-ins; comments and everything else stay."""
    addresses = {**simulation.engines, "": simulation.lmcache}
    moves = {url: addresses[name] for url, name in plan.replaced.items()}
    for before in sorted(moves, key=len, reverse=True):
        if before not in text:
            raise ConfigError([Problem("", f"{before} is not in the file literally", "write the URL out")])
        text = text.replace(before, moves[before])
    return text


def print_addresses(plan: SimulationPlan, simulation: ServedFleet, out: TextIO, *, config: Path | None) -> None:
    """Print the servers with their addresses, and the next command."""
    for name, engine in plan.fleet.engines.items():
        kind = "vLLM" if isinstance(engine, VllmSettings) else "SGLang"
        models = engine.models if isinstance(engine, VllmSettings | SglangSettings) else ()
        print(f"{kind} {name} ({', '.join(models)}) on {simulation.engines[name]}", file=out)
    if simulation.lmcache:
        kind = "controller" if plan.fleet.coordinator is None else "coordinator"
        print(f"LMCache {kind} on {simulation.lmcache}", file=out)
    if config is not None:
        print(f"\nkvproxy serve -c {config}", file=out)
    else:
        print(f"\n# config.yaml\n{_sample_config(simulation)}", file=out)
    first = next(iter(simulation.engines.values()))
    print("\n# a fault while it runs: the next 5 requests fail", file=out)
    print(f"curl -s {first}/sim/faults -H 'content-type: application/json' -d '{{\"fail_next\": 5}}'", file=out)
    print("\nCtrl-C ends everything.", file=out)


def _sample_config(simulation: ServedFleet) -> str:
    lines = ["endpoints:", *(f"  {name}: {url}" for name, url in simulation.engines.items())]
    if simulation.lmcache:
        lines += ["filters:", f"  kvcache: {{lmcache_endpoint: {simulation.lmcache}}}"]
    return "\n".join(lines)
