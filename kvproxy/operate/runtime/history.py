"""The last minutes, one sample a second, and the last hour, one in ten, from counters that exist anyway: what the live
page draws. Bounded."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Sleep
from kvproxy.cache.metrics import KvCacheMetrics
from kvproxy.cluster.metrics import EndpointRequestMetrics
from kvproxy.operate.runtime.recent import FailureTally, RecentDecisions, Tally
from kvproxy.proxy.metrics import CacheUseMetrics, RequestMetrics

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
INTERVAL_S = 1.0
KEPT = 300
#: Samples merged into one of the hour, and how many of those are kept.
COARSE = 10
HOUR_KEPT = 360


class Sampled(Protocol):
    """Sources of samples."""

    @property
    def recent(self) -> RecentDecisions: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def clock(self) -> Clock: ...


@dataclass(frozen=True, slots=True)
class HistorySample:
    """Figures of the time between the previous sample and `at`."""

    at: float
    tally: Tally
    ttft_p50_s: float | None  # None: no streamed answer had a first byte
    ttft_p95_s: float | None
    prompt_tokens: float  # by the engines' count
    cached_tokens: float  # of these, cached tokens
    predicted_tokens: float  # matched tokens at the chosen endpoints
    saved_s: float  # of prefill, by learned speeds
    failures: FailureTally  # failed requests by cause
    attempt_failures: Mapping[tuple[str, str], int]  # by cluster and endpoint, those of retried requests included


class History(BackgroundTask):
    """Owns one task. Samples are read by whatever draws; `on_sample` is called with the time of each."""

    task_name = "history"

    def __init__(self, sampled: Sampled, *, sleep: Sleep = asyncio.sleep) -> None:
        self.samples: deque[HistorySample] = deque(maxlen=KEPT)
        self.hour: deque[HistorySample] = deque(maxlen=HOUR_KEPT)
        self.on_sample: list[Callable[[float], Awaitable[object]]] = []
        self._sampled = sampled
        self._sleep = sleep
        self._taken = 0
        self._last_at = self._hour_at = sampled.clock()
        self._last = [0.0, 0.0, 0.0, 0.0]
        self._attempt_failures: Mapping[tuple[str, str], int] = {}

    async def _run(self) -> None:
        while True:
            await self._sleep(INTERVAL_S)
            try:
                await self.take_sample()
            except Exception:
                log.exception("a sample for the live page is lost")

    async def take_sample(self) -> None:
        """One sample, of all since the one before."""
        recent = self._sampled.recent
        metrics = self._sampled.metrics
        now = self._sampled.clock()
        p50, p95 = list_quantiles(recent.ttfts_since(self._last_at))
        counters = (
            metrics.group(RequestMetrics).prompt_tokens,
            metrics.group(RequestMetrics).cached_tokens,
            metrics.group(KvCacheMetrics).predicted_tokens,
            metrics.group(CacheUseMetrics).saved_seconds,
        )
        counts = [counter.total() for counter in counters]
        prompt, cached, predicted, saved = (after - before for after, before in zip(counts, self._last, strict=True))
        self._last_at = now
        self._last = counts
        failed = (recent.take_failures(), self._take_attempt_failures())
        self.samples.append(
            HistorySample(now, recent.take_tally(), p50, p95, prompt, cached, predicted, saved, *failed)
        )
        self._taken += 1
        if self._taken % COARSE == 0:
            self._take_coarse(now)
        for on_sample in self.on_sample:
            await on_sample(now)

    def _take_attempt_failures(self) -> dict[tuple[str, str], int]:
        """Failed attempts since the last call. A series that began again counts from nothing."""
        counted: dict[tuple[str, str], int] = {}
        failures = self._sampled.metrics.group(EndpointRequestMetrics).attempt_failures
        for (cluster, endpoint, _), value in failures.list_values():
            counted[cluster, endpoint] = counted.get((cluster, endpoint), 0) + int(value)
        before = self._attempt_failures
        self._attempt_failures = counted
        grown = {key: value - min(value, before.get(key, 0)) for key, value in counted.items()}
        return {key: value for key, value in grown.items() if value}

    def _take_coarse(self, now: float) -> None:
        fine = list(islice(reversed(self.samples), COARSE))
        p50, p95 = list_quantiles(self._sampled.recent.ttfts_since(self._hour_at))
        self._hour_at = now
        self.hour.append(
            HistorySample(
                now,
                add_tallies(one.tally for one in fine),
                p50,
                p95,
                prompt_tokens=sum(one.prompt_tokens for one in fine),
                cached_tokens=sum(one.cached_tokens for one in fine),
                predicted_tokens=sum(one.predicted_tokens for one in fine),
                saved_s=sum(one.saved_s for one in fine),
                failures=add_tallies(one.failures for one in fine),
                attempt_failures=add_tallies(one.attempt_failures for one in fine),
            )
        )

    def last_minute(self, now: float) -> list[HistorySample]:
        """Return the samples of the last 60 s, the newest first."""
        found = []
        for sample in reversed(self.samples):
            if now - sample.at >= 60.0:
                break
            found.append(sample)
        return found


def add_tallies(tallies: Iterable[Mapping[K, int]]) -> dict[K, int]:
    """Return the sums by key over all of them."""
    counts: dict[K, int] = {}
    for tally in tallies:
        for key, number in tally.items():
            counts[key] = counts.get(key, 0) + number
    return counts


def list_quantiles(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Median and 95th percentile; None of nothing."""
    ordered = sorted(values)
    return find_quantile(ordered, 0.5), find_quantile(ordered, 0.95)


def find_quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the nearest rank; None of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
