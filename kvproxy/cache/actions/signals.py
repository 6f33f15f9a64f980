"""How busy and how full an instance is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvproxy.base.types import Clock
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.providers import TierMemory
from kvproxy.cluster.endpoint import Endpoint

#: Default of sequences an engine runs at once (vLLM's --max-num-seqs).
ENGINE_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class Pressure:
    """Shares from 0 to 1. None: no source reports it, and then nothing is done about it."""

    load: float | None = None
    memory: float | None = None


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

    def __init__(self, *, clock: Clock, max_age_s: float) -> None:
        self._clock = clock
        self.max_age_s = max_age_s
        self._engines: dict[Endpoint, tuple[float, EngineMetrics]] = {}
        self.memory: Sequence[TierMemory] = ()
        self._providers: dict[str, float] = {}  # by instance, the fullest of its tiers

    def note_scrape(self, endpoint: Endpoint, metrics: EngineMetrics) -> None:
        """Note a scrape of one engine."""
        self._engines[endpoint] = (self._clock(), metrics)

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
        """Return what bears on the endpoint now, by its engine and by LMCache."""
        read_at, metrics = self._engines.get(endpoint, (0.0, None))
        if metrics is not None and self._clock() - read_at > self.max_age_s:
            metrics = None
        load = None if metrics is None else engine_load(metrics)
        shares = [metrics.kv_usage if metrics is not None else None, self._providers.get(endpoint.instance_id)]
        return Pressure(load, max((share for share in shares if share is not None), default=None))
