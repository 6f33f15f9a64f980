"""How busy and how full an instance is, by the readings that settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.metrics_scraper import EngineReadings
from kvproxy.cache.store import KvStore, TierMemory
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.lmcache.settings import SignalSource, StrategySettings

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


class PressureGauge:
    """Pressure from the sources that the settings name: the engines' readings and the store's memory, or this host."""

    def __init__(
        self,
        settings: StrategySettings,
        *,
        clusters: Mapping[str, Cluster],
        engines: EngineReadings,
        store: KvStore,
        sample_host: Callable[[], HostUse] = sample_host,
    ) -> None:
        self._settings = settings
        self._clusters = clusters
        self._engines = engines
        self._store = store
        self._sample_host = sample_host
        self._host: HostUse | None = None

    def tick(self) -> None:
        """Between requests: take a sample of this host."""
        self._host = self._sample_host()

    def find_pressure(self, instance: str) -> Pressure:
        """Return what bears on an instance: the fullest and busiest of the endpoints under its id."""
        endpoints = [one for cluster in self._clusters.values() for one in cluster.endpoints]
        there = [one for one in endpoints if one.instance_id == instance]
        return Pressure(_most(map(self._find_load, there)), _most(map(self._find_memory, there)))

    def _find_load(self, endpoint: Endpoint) -> float | None:
        if self._settings.load_source is SignalSource.HOST:
            return None if self._host is None else self._host.cpu
        metrics = self._engines.current_scrape(endpoint)
        return None if metrics is None else engine_load(metrics)

    def _find_memory(self, endpoint: Endpoint) -> float | None:
        if self._settings.memory_source is SignalSource.HOST:
            return None if self._host is None else self._host.memory
        metrics = self._engines.current_scrape(endpoint)
        own = [one.share for one in self._store.memory if one.instance_id and one.instance_id == endpoint.instance_id]
        return _most([None if metrics is None else metrics.kv_usage, *own])


def _most(shares: Iterable[float | None]) -> float | None:
    return max((share for share in shares if share is not None), default=None)


def memory_series(memory: Iterable[TierMemory]) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield the store's memory by instance and tier, for the gauge."""
    for one in memory:
        yield (one.instance_id, one.tier.value, "used"), one.used_bytes
        if one.capacity_bytes:
            yield (one.instance_id, one.tier.value, "capacity"), one.capacity_bytes
