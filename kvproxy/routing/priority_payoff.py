"""Whether it pays to tell engines an order: measured on live traffic, in windows with and without. Pure.

Short prompts gain what long ones pay. The mean nearly always falls; where p99 grows by a larger share than that, the
order is not worth it. Which it is depends on slots, step budget, lengths and load, so it is measured, now and again:
every other minute without the number, until both kinds have enough first tokens to tell a p99.
"""

from __future__ import annotations

import math
from collections import Counter

#: One kind of window; of each the beginning is left out, where what waits still is of the other kind.
WINDOW_S, SETTLING_S = 60.0, 15.0
#: First tokens of each kind that decide.
ENOUGH = 2000
#: How long a decision stands.
STANDS_S = 6 * 3600.0

_BUCKETS = 20.0  # a factor of e: 5 % each
_LEAST_S = 1e-4


class _Waits:
    """Times to first token of one kind: their sum, and how they are distributed."""

    def __init__(self) -> None:
        self.count = 0
        self._sum_s = 0.0
        self._buckets: Counter[int] = Counter()  # a few hundred: from a tenth of a millisecond to hours

    def add(self, ttft_s: float) -> None:
        self.count += 1
        self._sum_s += ttft_s
        self._buckets[round(_BUCKETS * math.log(max(_LEAST_S, ttft_s)))] += 1

    @property
    def mean_s(self) -> float:
        return self._sum_s / self.count

    @property
    def p99_s(self) -> float:
        above = self.count // 100
        for bucket in sorted(self._buckets, reverse=True):
            above -= self._buckets[bucket]
            if above < 0:
                return math.exp(bucket / _BUCKETS)
        raise ValueError("no first token")


class PriorityPayoff:
    """One pool of engines that heed the number. `pays` is None until it is known."""

    def __init__(self) -> None:
        self.pays: bool | None = None
        self.mean_ratio: float | None = None  # with the number against without, as last decided
        self.p99_ratio: float | None = None
        self._decided_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._with, self._without = _Waits(), _Waits()

    @property
    def counted(self) -> tuple[int, int]:
        """First tokens of requests with and without the number, since the last decision."""
        return self._with.count, self._without.count

    def sends(self, at: float) -> bool:
        """Whether a request placed at that time carries the number."""
        if self.pays is not None and at - self._decided_at < STANDS_S:
            return self.pays
        return _is_with(at)

    def observe(self, placed_at: float, ttft_s: float) -> None:
        """The first token of a request that was placed then, on an engine in which requests wait."""
        if self.pays is not None and placed_at - self._decided_at < STANDS_S:
            return
        if placed_at % WINDOW_S < SETTLING_S:
            return
        (self._with if _is_with(placed_at) else self._without).add(ttft_s)
        if min(self.counted) >= ENOUGH:
            self._decide(placed_at)

    def _decide(self, at: float) -> None:
        self.mean_ratio = self._with.mean_s / self._without.mean_s
        self.p99_ratio = self._with.p99_s / self._without.p99_s
        self.pays = self.p99_ratio - 1.0 <= 1.0 - self.mean_ratio
        self._decided_at = at
        self._begin()


def _is_with(at: float) -> bool:
    return int(at // WINDOW_S) % 2 == 0
