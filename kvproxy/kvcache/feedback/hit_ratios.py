"""Each engine's own count of prefix-cache hits beside what its responses said and what was predicted. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvproxy.clients.engine_metrics import EngineMetrics
from kvproxy.types import EndpointId

#: Scrapes the ratios are taken over: the last minute at the usual five seconds.
SCRAPES = 13
#: Fewer tokens than these in that time make no ratio.
_LEAST_TOKENS = 2_000

Key = tuple[str, EndpointId]  # cluster, endpoint


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Shares of prompt tokens over the last scrapes. None: too few, or no source reports it."""

    engine: float | None  # reused, by the engine's own counters, for all its clients
    responses: float | None  # reused, by what responses told this proxy
    prediction: float | None  # expected to be reused when they were placed
    foreign: float | None  # that the engine looked up and this proxy did not send


@dataclass(frozen=True, slots=True)
class _Reading:
    queries: int
    hits: int
    prompt: int
    cached: int
    predicted: int


class _EndpointCounts:
    __slots__ = ("cached", "predicted", "prompt", "readings")

    def __init__(self) -> None:
        self.prompt = self.cached = self.predicted = 0
        self.readings: deque[_Reading] = deque(maxlen=SCRAPES)


class HitRatioStats:
    """Bounded by the endpoints there are: `keep` forgets the others."""

    def __init__(self) -> None:
        self._endpoints: dict[Key, _EndpointCounts] = {}

    def served(self, key: Key, *, prompt_tokens: int, cached_tokens: int, predicted_tokens: int) -> None:
        """A response came from there."""
        counts = self._endpoints.get(key)
        if counts is None:
            counts = self._endpoints[key] = _EndpointCounts()
        counts.prompt += prompt_tokens
        counts.cached += cached_tokens
        counts.predicted += predicted_tokens

    def scraped(self, key: Key, metrics: EngineMetrics) -> bool:
        """The engine's counters now. True: they began at zero again, as those of a process that restarted."""
        queries, hits = metrics.prefix_queries_tokens, metrics.prefix_hits_tokens
        if queries is None or hits is None:
            return False
        counts = self._endpoints.setdefault(key, _EndpointCounts())
        restarted = bool(counts.readings) and queries < counts.readings[-1].queries
        if restarted:
            counts.readings.clear()
        counts.readings.append(_Reading(queries, hits, counts.prompt, counts.cached, counts.predicted))
        return restarted

    def use(self, key: Key) -> CacheUse:
        """The shares of late."""
        counts = self._endpoints.get(key)
        if counts is None or len(counts.readings) < 2:
            return CacheUse(None, None, None, None)
        first, last = counts.readings[0], counts.readings[-1]
        looked_up, sent = last.queries - first.queries, last.prompt - first.prompt
        return CacheUse(
            engine=_share(last.hits - first.hits, looked_up),
            responses=_share(last.cached - first.cached, sent),
            prediction=_share(last.predicted - first.predicted, sent),
            foreign=_share(looked_up - sent, looked_up),
        )

    def hit_series(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Hit ratios by source of the count."""
        for key in list(self._endpoints):
            use = self.use(key)
            for by in ("engine", "responses", "prediction"):
                ratio = getattr(use, by)
                if ratio is not None:
                    yield (*map(str, key), by), ratio

    def foreign_series(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Share of others."""
        for key in list(self._endpoints):
            foreign = self.use(key).foreign
            if foreign is not None:
                yield tuple(map(str, key)), foreign

    def keep(self, present: Collection[Key]) -> None:
        """Forget all endpoints but these."""
        self._endpoints = {key: counts for key, counts in self._endpoints.items() if key in present}


def _share(part: int, whole: int) -> float | None:
    return None if whole < _LEAST_TOKENS else min(1.0, max(0.0, part / whole))
