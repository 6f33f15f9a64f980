"""How long a simulated engine's steps take, and the gaps between tokens that come of it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

#: The unit the decode cost of resident KV is stated in.
RESIDENT_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Speed of one engine. The defaults are those of a mid-size model on one accelerator.

    `slowness` multiplies every duration; `slowness_changes` are `(time_s, factor)` pairs in order of time, each in
    force from its time on. A step without decodes takes `prefill_floor_s` at least: however few tokens it computes, it
    reads the weights. `time_scale` stretches (> 1) or shrinks (< 1) everything, for demonstrations and tests.
    """

    prefill_tokens_per_s: float = 10_000.0
    quadratic_tokens: float = 32_000.0
    prefill_step_s: float = 0.0
    prefill_floor_s: float = 0.0
    decode_step_s: float = 0.008
    decode_sequence_s: float = 0.000_05
    decode_resident_block_s: float = 0.000_02
    slowness: float = 1.0
    slowness_changes: tuple[tuple[float, float], ...] = ()
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0 or self.quadratic_tokens <= 0:
            raise ValueError("prefill speed and quadratic length must be positive")
        if self.decode_step_s <= 0 or self.time_scale <= 0 or self.slowness <= 0:
            raise ValueError("decode step, time scale and slowness must be positive")
        if self.prefill_floor_s < 0:
            raise ValueError("the floor of a step must be at least 0")
        if any(factor <= 0 for _, factor in self.slowness_changes):
            raise ValueError("slowness factors must be positive")
        if list(self.slowness_changes) != sorted(self.slowness_changes):
            raise ValueError("slowness changes must be in order of time")

    def factor_at(self, now: float) -> float:
        """Return what durations beginning at `now` are multiplied by."""
        index = bisect_right(self.slowness_changes, (now, math.inf)) - 1
        slowness = self.slowness if index < 0 else self.slowness_changes[index][1]
        return slowness * self.time_scale

    def next_change_after(self, now: float) -> float:
        """When the factor changes next; infinity when it does not."""
        index = bisect_right(self.slowness_changes, (now, math.inf))
        return self.slowness_changes[index][0] if index < len(self.slowness_changes) else math.inf

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Seconds, at factor 1, to prefill tokens that follow `cached_tokens`; additive over chunks."""
        depth = (cached_tokens + uncached_tokens / 2) / self.quadratic_tokens
        return uncached_tokens / self.prefill_tokens_per_s * (1.0 + depth)

    def decode_s(self, sequences: int, resident_tokens: int) -> float:
        """Seconds, at factor 1, of one decode step over sequences that hold `count_resident_tokens` between them."""
        resident = resident_tokens / RESIDENT_BLOCK_TOKENS * self.decode_resident_block_s
        return self.decode_step_s + sequences * self.decode_sequence_s + resident

    def decode_growth_s(self, sequences: int) -> float:
        """How much longer, at factor 1, each decode step is than the one before it: one more token a sequence."""
        return sequences / RESIDENT_BLOCK_TOKENS * self.decode_resident_block_s


@dataclass(slots=True)
class Stretch:
    """`steps` engine steps in a row, step i taking `step_s + i * growth_s`; ends may be moved to an earlier step."""

    started_at: float
    step_s: float
    growth_s: float = 0.0
    steps: int = 1

    @property
    def ends_at(self) -> float:
        """When the last step is done."""
        return self.started_at + self.steps * self.step_s + self.growth_s * self.steps * (self.steps - 1) / 2

    def cut(self, moment: float) -> None:
        """End it with the step under way at `moment` (or that ends there)."""
        if self.steps > 1 and moment < self.ends_at:
            self.steps = min(self.steps, self._steps_until(moment - self.started_at))

    def _steps_until(self, elapsed_s: float) -> int:
        """Least number of steps, at least one, that take `elapsed_s` or more."""
        if elapsed_s <= self.step_s:
            return 1
        if self.growth_s == 0.0:
            return math.ceil(elapsed_s / self.step_s - 1e-9)
        half = self.growth_s / 2
        linear = self.step_s - half
        root = (-linear + math.sqrt(linear * linear + 4 * half * elapsed_s)) / (2 * half)
        return max(1, math.ceil(root - 1e-9))


class TokenGaps:
    """Times from one token of an answer to the next, all answers together, in steps of two per cent."""

    _STEP = math.log(1.02)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, gap_s: float, count: int = 1) -> None:
        """`count` tokens came `gap_s` after the one before them."""
        self._counts[round(math.log(max(gap_s, 1e-6)) / self._STEP)] += count

    @property
    def total(self) -> int:
        """How many there were."""
        return self._counts.total()

    def update(self, other: TokenGaps) -> None:
        """Add the other's tokens."""
        self._counts.update(other._counts)

    def percentile(self, share: float) -> float:
        """Seconds that so many of the gaps do not exceed, within one per cent; 0 of none."""
        left = share * self.total
        for step, count in sorted(self._counts.items()):
            left -= count
            if left < 0:
                return math.exp(step * self._STEP)
        return math.exp(max(self._counts) * self._STEP) if self._counts else 0.0
