"""The last minutes, one sample a second, from counters that exist anyway: what the live page draws. Bounded."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproxy.admin.counts import total
from kvproxy.filters.recent import RecentDecisions, Tally
from kvproxy.metrics.catalog import Metrics
from kvproxy.owned_task import OwnedTask
from kvproxy.types import Clock

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
KEPT = 300

Sleep = Callable[[float], Awaitable[None]]


class Sampled(Protocol):
    """What samples are taken from."""

    @property
    def recent(self) -> RecentDecisions: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def clock(self) -> Clock: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened between the sample before and `at`."""

    at: float
    tally: Tally
    ttft_p50_s: float | None  # None: nobody got a first byte
    ttft_p95_s: float | None
    prompt_tokens: float  # by the engines' count
    cached_tokens: float  # of these, from cache
    predicted_tokens: float  # matched tokens where requests went


class History(OwnedTask):
    """Owns one task. Samples are read by whoever draws."""

    task_name = "admin history"

    def __init__(self, sampled: Sampled, *, sleep: Sleep = asyncio.sleep) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._sampled = sampled
        self._sleep = sleep
        self._last_at = sampled.clock()
        self._last = (0.0, 0.0, 0.0)

    async def _run(self) -> None:
        while True:
            await self._sleep(INTERVAL_S)
            try:
                self.take()
            except Exception:
                log.exception("a sample for the live page is lost")

    def take(self) -> None:
        """One sample, of all since the one before."""
        recent, metrics, now = self._sampled.recent, self._sampled.metrics, self._sampled.clock()
        ttfts = sorted(recent.ttfts_since(self._last_at))
        counts = (total(metrics.prompt_tokens), total(metrics.cached_tokens), total(metrics.kv_predicted_tokens))
        prompt, cached, predicted = (after - before for after, before in zip(counts, self._last, strict=True))
        self._last_at, self._last = now, counts
        p50, p95 = quantile(ttfts, 0.5), quantile(ttfts, 0.95)
        self.samples.append(Sample(now, recent.take_tally(), p50, p95, prompt, cached, predicted))

    def last_minute(self, now: float) -> Tally:
        """Requests by cluster, endpoint and end over the last 60 s."""
        counts: Tally = {}
        for sample in reversed(self.samples):
            if now - sample.at >= 60.0:
                break
            for key, number in sample.tally.items():
                counts[key] = counts.get(key, 0) + number
        return counts


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest rank; None of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
