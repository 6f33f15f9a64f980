"""How busy and how full an instance is, by the readings that settings name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from kvproxy.base.types import Clock
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.providers import TierMemory
from kvproxy.cache.settings import CacheStrategySettings, SignalSource
from kvproxy.cluster.endpoint import Endpoint

#: Default of sequences an engine runs at once (vLLM's --max-num-seqs).
ENGINE_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class Pressure:
    """Shares from 0 to 1. None: no source reports it, and then nothing is done about it."""

    load: float | None = None
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class HostUse:
    """This host's processors and memory."""

    cpu: float
    memory: float


def sample_host() -> HostUse:
    """Return processor use since the last call (0 for the first) and memory use now; does not block."""
    return HostUse(psutil.cpu_percent(interval=None) / 100.0, psutil.virtual_memory().percent / 100.0)


def engine_load(metrics: EngineMetrics) -> float | None:
    """Return the busier of: running sequences against what an engine runs at once, and the share of requests
    that wait."""
    if metrics.running is None and metrics.waiting is None:
        return None
    running = metrics.running or 0
    waiting = metrics.waiting or 0
    queued = waiting / (waiting + running) if waiting else 0.0
    return min(1.0, max(running / ENGINE_SEQUENCES, queued))


class Signals:
    """Latest readings; one older than `max_age_s` no longer counts."""

    def __init__(self, settings: CacheStrategySettings, *, clock: Clock, max_age_s: float) -> None:
        self._settings = settings
        self._clock = clock
        self.max_age_s = max_age_s
        self._engines: dict[Endpoint, tuple[float, EngineMetrics]] = {}
        self._host: HostUse | None = None
        self.memory: Sequence[TierMemory] = ()
        self._providers: dict[str, float] = {}  # by instance, the fullest of its tiers

    def note_scrape(self, endpoint: Endpoint, metrics: EngineMetrics) -> None:
        """Note a scrape of one engine."""
        self._engines[endpoint] = (self._clock(), metrics)

    def note_host(self, use: HostUse) -> None:
        """Note a sample of this host."""
        self._host = use

    def note_memory(self, memory: Sequence[TierMemory]) -> None:
        """Note LMCache's report of its memory."""
        self.memory = memory
        self._providers = {}
        for one in memory:
            if one.share is not None and one.instance_id:
                self._providers[one.instance_id] = max(one.share, self._providers.get(one.instance_id, 0.0))

    def memory_series(self) -> Iterator[tuple[tuple[str, str, str], float]]:
        """Yield the same by instance and tier, for the gauge."""
        for one in self.memory:
            yield (one.instance_id, one.tier.value, "used"), one.used_bytes
            if one.capacity_bytes:
                yield (one.instance_id, one.tier.value, "capacity"), one.capacity_bytes

    def keep_only(self, endpoints: frozenset[Endpoint]) -> None:
        """Forget the readings of all others."""
        self._engines = {endpoint: reading for endpoint, reading in self._engines.items() if endpoint in endpoints}

    def latest_scrape(self, endpoint: Endpoint) -> tuple[float, EngineMetrics] | None:
        """Age in seconds and content of the latest scrape; None before the first."""
        read_at, metrics = self._engines.get(endpoint, (0.0, None))
        return None if metrics is None else (self._clock() - read_at, metrics)

    def pressure(self, endpoint: Endpoint) -> Pressure:
        """Return what bears on the endpoint now, from the sources the settings name."""
        read_at, metrics = self._engines.get(endpoint, (0.0, None))
        if metrics is not None and self._clock() - read_at > self.max_age_s:
            metrics = None
        settings = self._settings
        host = self._host
        if settings.load_source is SignalSource.HOST:
            load = None if host is None else host.cpu
        else:
            load = None if metrics is None else engine_load(metrics)
        if settings.memory_source is SignalSource.HOST:
            memory = None if host is None else host.memory
        else:
            shares = [metrics.kv_usage if metrics is not None else None, self._providers.get(endpoint.instance_id)]
            memory = max((share for share in shares if share is not None), default=None)
        return Pressure(load, memory)
