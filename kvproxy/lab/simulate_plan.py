"""Plan of simulated engines and LMCache services with their ports: by options, or in place of those in a configuration
file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.addresses import is_loopback
from kvproxy.cache.settings import KvCacheSettings, Provider
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.operate.config.schema import Config

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
